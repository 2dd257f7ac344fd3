"""The matrix of faults: what is broken, in which job, on which servers; and what was counted afterwards.

A fault is a function of one module here whose name begins with `faults_`. It makes one round and says what it found:

    from matrix.ground import Ground
    from matrix.scenario import Count, fault

    @fault("killed between the commit and the ack", job="ingest", kinds=("postgresql", "sqlite"), runs=20)
    def killed_after_commit(ground: Ground) -> Count:
        url = ground.database()             # new and empty, of this round's kind
        ...                                 # fill, start the job, break it, repeat the job until it is quiet
        return Count(messages=300, lost=0, changed=0, doubled=12, allowed=256)

The name it is chosen by is the function's; the text is shown by `scripts/faults --list`. `kinds` are the
queue types ("classic", "quorum") or stores ("postgresql", "sqlite") it is tried on; a round has one: `ground.kind`.
`scripts/faults` calls the function `runs` times (or as --runs and --seconds say), each time with a virtual host of its
own and another seed; a test in tests/faults calls `matrix.rounds.once(...)`.

Whatever decides by chance asks `ground.random`, so that a seed repeats it. What was lost, changed and doubled is found
by code that uses nothing of dlqbatch (oracle.py, rawamqp.py, plain SQL). A wrong exit code, a report that does not add
up, or anything else that a user would complain about is an AssertionError: the round has failed, and its seed,
the text and the reports noted by `ground.note` are kept.

scenario     Count, fault: what a fault is, and the list of all
ground       what a round stands on: a broker, a node that may be killed, a database, chance, a folder
rounds       one round, or many; what they found
page         docs/reliability.json, and its summary in docs/reliability.md
__main__     the command line of scripts/faults
"""
