-- The rights of the roles that work with dlqbatch's tables on PostgreSQL, and not one more: docs/permissions.md.
--
--     psql -v ON_ERROR_STOP=1 --single-transaction -d DATABASE -f sql/grants.postgresql.sql
--
-- Run it as a superuser, or as the owner of the tables with CREATEROLE, after every `dlqbatch db upgrade`: running it
-- again changes nothing. The roles are groups without a login; a login becomes a member:
--
--     CREATE ROLE payments_jobs LOGIN PASSWORD '…' IN ROLE dlqbatch_worker;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['dlqbatch_drain', 'dlqbatch_worker', 'dlqbatch_operator', 'dlqbatch_reader',
                              'dlqbatch_revealer'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', name);
        END IF;
    END LOOP;
END
$$;

GRANT USAGE ON SCHEMA public TO dlqbatch_drain, dlqbatch_worker, dlqbatch_operator, dlqbatch_reader, dlqbatch_revealer;

-- A drain, or a check, that runs apart from the other jobs: it reads the policy, and adds its report to the log of runs.
GRANT SELECT ON dlq_event_config TO dlqbatch_drain;
GRANT INSERT ON dlq_runs TO dlqbatch_drain;

-- The jobs: drain, check, ingest, lifecycle, replay, monitor, retain; and the doctor, which looks at the schema's version.
GRANT SELECT ON dlq_event_config, dlq_rules, dlqbatch_version TO dlqbatch_worker;
GRANT SELECT, INSERT ON dlq_scopes TO dlqbatch_worker;
GRANT SELECT, INSERT, UPDATE, DELETE ON dlq_messages, dlq_runs, dlq_alerts, dlq_unproven_runs TO dlqbatch_worker;
GRANT SELECT, INSERT, UPDATE ON dlq_alert_receivers, dlq_looks TO dlqbatch_worker;
GRANT SELECT, INSERT, DELETE ON dlq_queue_readings TO dlqbatch_worker;
GRANT SELECT, INSERT, UPDATE, DELETE ON dlq_scope_unproven TO dlqbatch_worker;
GRANT SELECT, INSERT, UPDATE ON dlq_attempts, dlq_scope_breakers TO dlqbatch_worker;
GRANT SELECT, INSERT ON dlq_transitions TO dlqbatch_worker;
GRANT SELECT, UPDATE, DELETE ON dlq_plans TO dlqbatch_worker;
GRANT SELECT, UPDATE, DELETE ON dlq_plan_items TO dlqbatch_worker;
GRANT SELECT, INSERT, DELETE ON dlq_cold_copies TO dlqbatch_worker;
GRANT SELECT, INSERT, DELETE ON dlq_fields TO dlqbatch_worker;
GRANT SELECT, INSERT, UPDATE ON dlq_field_backfills, dlq_stream_offsets TO dlqbatch_worker;
GRANT SELECT, INSERT, UPDATE, DELETE ON dlq_counts TO dlqbatch_worker;
GRANT SELECT, DELETE ON dlq_count_changes TO dlqbatch_worker;
GRANT SELECT ON dlq_facet_counts TO dlqbatch_worker;
GRANT SELECT, DELETE ON dlq_actions, dlq_action_rows TO dlqbatch_worker;
GRANT SELECT, INSERT, UPDATE ON dlq_groups TO dlqbatch_worker;

-- People who decide about dead messages: messages, replay, ingest --head, rules, events, archive restore; and all that a
-- reader sees.
GRANT SELECT, INSERT, UPDATE, DELETE ON dlq_event_config, dlq_rules TO dlqbatch_operator;
GRANT SELECT, INSERT, UPDATE ON dlq_messages, dlq_attempts, dlq_scope_breakers, dlq_plans, dlq_plan_items TO dlqbatch_operator;
GRANT SELECT, INSERT, DELETE ON dlq_transitions TO dlqbatch_operator;
GRANT SELECT, INSERT, UPDATE ON dlq_actions, dlq_action_rows, dlq_groups TO dlqbatch_operator;
GRANT SELECT, INSERT ON dlq_runs, dlq_scopes TO dlqbatch_operator;
GRANT SELECT ON dlq_alerts, dlq_looks, dlq_counts, dlq_count_changes, dlq_facet_counts, dlq_stream_offsets, dlqbatch_version TO dlqbatch_operator;
GRANT SELECT, INSERT, DELETE ON dlq_queue_readings TO dlqbatch_operator;
GRANT SELECT, INSERT, UPDATE, DELETE ON dlq_scope_unproven, dlq_unproven_runs TO dlqbatch_operator;
GRANT SELECT, INSERT, DELETE ON dlq_fields TO dlqbatch_operator;
GRANT SELECT, UPDATE, DELETE ON dlq_cold_copies TO dlqbatch_operator;

-- Who only looks: status, messages list, groups, search, show and journal, replay status, rules list, events list, db current.
GRANT SELECT ON dlq_event_config, dlq_rules, dlq_messages, dlq_attempts, dlq_transitions, dlq_runs, dlq_scopes, dlq_scope_breakers, dlq_plans, dlq_plan_items, dlq_alerts, dlq_looks, dlq_scope_unproven, dlq_actions, dlq_action_rows, dlq_fields, dlq_groups, dlq_counts, dlq_count_changes, dlq_facet_counts, dlq_stream_offsets, dlqbatch_version TO dlqbatch_reader;

-- Who may also use --reveal and edit a body: a reader or an operator who is a member of this group too. The view lets
-- them add the line of the journal that says who saw what, and no other line.
GRANT INSERT ON dlq_reveals TO dlqbatch_revealer;
