"""Commands that ask a console elsewhere: the same functions, answered by its API in place of the database."""
