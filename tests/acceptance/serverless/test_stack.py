"""What a deployment makes of an account, read back through each service's API; and whether it runs there."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from program import Program, client
from serverless_template import (
    COLD_KEY,
    DATABASE_SECRET,
    JOBS,
    MINUTELY,
    REGION,
    SECRET_KEY,
    Stack,
    as_lambda,
    document,
)
from sqlalchemy.engine import make_url

from dlqbatch import settings
from dlqbatch.aws import metrics
from dlqbatch.aws.events import Request, understand

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


ALARMS = "lambda.alarms.cloudwatch.amazonaws.com"
LOADED_AHEAD = {"pika", "psycopg", "pydantic_core"}
"""Of these, a run finds every module loaded by the start of its function. Of SQLAlchemy too, but a drain loads it only
for its first message: one that finds none needs no more than the driver."""
HANDLE = (
    "import json, sys, handler\n"
    "class Context:\n"
    "    def get_remaining_time_in_millis(self): return 60_000\n"
    "ahead = set(sys.modules)\n"
    "report = handler.handler(json.loads({event!r}), Context())\n"
    "print()\n"
    "print(json.dumps([report, sorted(set(sys.modules) - ahead)]))\n"
)


def schedule_of(stack: Stack, job: str) -> tuple[dict[str, Any], str]:
    """The rule that invokes the job's function, and what it sends."""
    events = stack.client("events")
    arn = stack.client("lambda").get_function(FunctionName=stack.function(job))["Configuration"]["FunctionArn"]
    found = [
        (rule, target["Input"])
        for rule in events.list_rules()["Rules"]
        for target in events.list_targets_by_rule(Rule=rule["Name"])["Targets"]
        if target["Arn"] == arn
    ]
    (only,) = found
    return only


def test_what_is_deployed_runs_with_its_own_environment_events_and_services(
    task: Path, prod: Stack, broker_url: str, database_url: str
) -> None:
    """The package, each function's variables and its rule's input, against the account that the template made."""
    program = Program({"broker_url": broker_url, "database_url": database_url})
    for arguments in (("db", "upgrade"), ("events", "set", "orders.*", "3"), ("topology", "apply")):
        done = program.run(*arguments)
        assert done.code == 0, done.said
    with client(broker_url) as team:
        team.make_origin("orders.q")
        team.fail("orders.q", "orders.created", b"1", b"2", b"3")
        team.fail("orders.q", "unknown.event", b"4")
    database = make_url(database_url)
    nobody = database.set(username=None).render_as_string()
    addresses = {"broker_url": broker_url, "database_url": nobody}
    login = {"username": database.username, "password": "any", "engine": "postgres"}
    secrets = prod.client("secretsmanager")
    secrets.create_secret(Name="payments/dlqbatch", SecretString=json.dumps(addresses))
    # Every secret gets an ARN with an ending of its own, so that the one in the template is that of another.
    made = secrets.create_secret(Name="rds!db-1", SecretString=json.dumps(login))["ARN"]
    access = {
        "AWS_ENDPOINT_URL": prod.account.address,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "DLQBATCH_DATABASE_SECRET": made,
    }

    counted = {}
    for job in ("drain", "ingest", "lifecycle", "replay", "monitor", "retain"):
        variables = prod.client("lambda").get_function(FunctionName=prod.function(job))["Configuration"]["Environment"]
        _, event = schedule_of(prod, job)
        report, loaded_late = as_lambda(task, HANDLE.format(event=event), **(variables["Variables"] | access))
        assert (report["job"], report["outcome"]) == (job, "ok"), report
        ahead = LOADED_AHEAD if job == "drain" else LOADED_AHEAD | {"sqlalchemy"}
        assert [module for module in loaded_late if module.partition(".")[0] in ahead] == [], job
        counted[job] = {name: number for name, number in report["counts"].items() if number}
    assert counted["drain"] == {"got": 4, "delayed": 3, "dead_lettered": 1}
    assert counted["ingest"] == {"got": 1, "recorded": 1}


def test_each_function_has_settings_that_the_program_accepts_and_time_to_end_in_order(stack: Stack) -> None:
    functions = {one["FunctionName"]: one for one in stack.client("lambda").list_functions()["Functions"]}
    for job in JOBS:
        deployed = functions[stack.function(job)]
        assert deployed["Handler"] == "handler.handler"
        assert deployed["Runtime"] == "python3.12"
        variables = deployed["Environment"]["Variables"]
        options = set(settings.OPTIONS)
        assert {name.removeprefix("DLQBATCH_").lower() for name in variables} <= options
        read = settings.load({}, variables | {"DLQBATCH_CONFIG": os.devnull})
        assert (read.job, read.log_format) == (job, "json")
        assert read.secret == ("payments/dlqbatch" if stack.name.endswith("prod") else "dlqbatch/dev")
        assert read.database_secret == (DATABASE_SECRET if stack.name.endswith("prod") else None)
        assert read.metrics_namespace == ("dlqbatch/prod" if stack.name.endswith("prod") else None)
        assert read.max_seconds + read.settle_seconds + read.lambda_margin_seconds < deployed["Timeout"]
        assert (read.alert_topic is not None) == (job == "monitor")
        assert (read.cold_storage is not None) == (job == "retain")
        assert "URL" not in " ".join(variables)


def test_retain_has_more_memory_than_the_others_because_it_holds_rows(stack: Stack) -> None:
    functions = {one["FunctionName"]: one for one in stack.client("lambda").list_functions()["Functions"]}
    assert {job: functions[stack.function(job)]["MemorySize"] for job in JOBS} == {
        **dict.fromkeys(JOBS, 512),
        "retain": 1024,
    }


def test_every_function_runs_the_package(stack: Stack, zipped: Path) -> None:
    digest = base64.b64encode(hashlib.sha256(zipped.read_bytes()).digest()).decode()
    for job in JOBS:
        deployed = stack.client("lambda").get_function(FunctionName=stack.function(job))["Configuration"]
        assert (deployed["CodeSha256"], deployed["CodeSize"]) == (digest, zipped.stat().st_size)


def test_every_job_has_its_schedule_and_check_waits_until_it_is_wanted(stack: Stack) -> None:
    wanted = dict.fromkeys(MINUTELY, "rate(1 minute)") | {"retain": "cron(0 3 * * ? *)", "check": "rate(5 minutes)"}
    for job in JOBS:
        rule, event = schedule_of(stack, job)
        assert rule["ScheduleExpression"] == wanted[job]
        asleep = job == "check" and stack.name.endswith("dev")
        assert rule["State"] == ("DISABLED" if asleep else "ENABLED")
        assert understand(json.loads(event)) == Request(job)


def invokers(stack: Stack, job: str) -> dict[str, list[dict[str, Any]]]:
    """By service: the conditions under which it may invoke the function."""
    policy = json.loads(stack.client("lambda").get_policy(FunctionName=stack.function(job))["Policy"])
    assert {one["Action"] for one in policy["Statement"]} == {"lambda:InvokeFunction"}
    found: dict[str, list[dict[str, Any]]] = {}
    for one in policy["Statement"]:
        found.setdefault(one["Principal"]["Service"], []).append(one["Condition"])
    return found


def by_alarms(*found: dict[str, Any]) -> list[dict[str, Any]]:
    """The conditions under which CloudWatch may invoke a function for these alarms, and for no others."""
    ours = {"AWS:SourceAccount": "123456789012"}
    return [{"ArnLike": {"AWS:SourceArn": one["AlarmArn"]}, "StringEquals": ours} for one in found]


def test_each_rule_and_nothing_else_may_invoke_its_function(stack: Stack) -> None:
    for job in JOBS:
        rule, _ = schedule_of(stack, job)
        found = invokers(stack, job)
        assert found.pop("events.amazonaws.com") == [{"ArnLike": {"AWS:SourceArn": rule["Arn"]}}]
        by_depth = stack.name.endswith("prod") and job in ("drain", "ingest")
        assert set(found) == ({ALARMS} if by_depth else set())


def alarms(stack: Stack) -> dict[str, dict[str, Any]]:
    found = stack.client("cloudwatch").describe_alarms(AlarmNamePrefix=f"{stack.name}-", MaxRecords=100)
    return {one["AlarmName"].removeprefix(f"{stack.name}-"): one for one in found["MetricAlarms"]}


def test_a_deep_retry_queue_on_amazon_mq_invokes_drain_directly_and_may(prod: Stack) -> None:
    alarm = alarms(prod)["retry-queue-deep"]
    assert (alarm["Namespace"], alarm["MetricName"]) == ("AWS/AmazonMQ", "MessageReadyCount")
    assert {one["Name"]: one["Value"] for one in alarm["Dimensions"]} == {
        "Broker": "orders-mq",
        "VirtualHost": "shop",
        "Queue": "retry-queue",
    }
    assert (alarm["Threshold"], alarm["ComparisonOperator"]) == (500.0, "GreaterThanOrEqualToThreshold")
    assert (alarm["Period"], alarm["EvaluationPeriods"]) == (60, 1)
    drain = prod.client("lambda").get_function(FunctionName=prod.function("drain"))["Configuration"]["FunctionArn"]
    assert alarm["AlarmActions"] == [drain]
    assert by_alarms(alarm)[0] in invokers(prod, "drain")[ALARMS]
    # What CloudWatch then sends is read back by test_cloud_events.py and run in test_lambda.py.


def test_what_a_run_leaves_in_deep_queues_starts_the_next_one_on_any_broker(prod: Stack, dev: Stack) -> None:
    """With the very namespace, name and dimensions that the program prints."""
    found = alarms(prod)
    for job in ("drain", "ingest"):
        queues = {"a": {"found": 900, "left": 400}, "b": {"found": 200, "left": 100}}
        told = {"outcome": "ok", "hit_bound": True, "queues": queues}
        printed = json.loads(metrics.line("dlqbatch/prod", job, metrics.figures(told)))
        (directive,) = printed["_aws"]["CloudWatchMetrics"]
        (dimensions,) = directive["Dimensions"]
        for name, period, times, statistic in (("deep", 60, 1, "Maximum"), ("stays-deep", 300, 3, "Minimum")):
            alarm = found[f"{job}-{name}"]
            assert alarm["Namespace"] == directive["Namespace"]
            assert printed[alarm["MetricName"]] == [500]
            assert {one["Name"]: one["Value"] for one in alarm["Dimensions"]} == {
                name: printed[name] for name in dimensions
            }
            assert (alarm["Threshold"], alarm["ComparisonOperator"]) == (500.0, "GreaterThanOrEqualToThreshold")
            assert (alarm["Period"], alarm["EvaluationPeriods"], alarm["Statistic"]) == (period, times, statistic)
            assert alarm["TreatMissingData"] == "notBreaching"
        function = prod.client("lambda").get_function(FunctionName=prod.function(job))["Configuration"]["FunctionArn"]
        assert found[f"{job}-deep"]["AlarmActions"] == [function]
        stays = found[f"{job}-stays-deep"]
        assert stays["AlarmActions"] == stays["OKActions"] == [prod.outputs["AlertTopic"]]
    assert invokers(prod, "ingest")[ALARMS] == by_alarms(found["ingest-deep"])
    drains = by_alarms(found["drain-deep"], found["retry-queue-deep"])
    assert sorted(invokers(prod, "drain")[ALARMS], key=str) == sorted(drains, key=str)
    assert [name for name in alarms(dev) if "deep" in name] == []


def test_without_amazon_mq_there_is_no_alarm_on_its_queue(dev: Stack) -> None:
    assert [name for name in alarms(dev) if "retry-queue" in name] == []


def test_who_is_on_call_hears_of_every_function_that_fails_is_throttled_or_does_not_run(stack: Stack) -> None:
    topic = stack.outputs["AlertTopic"]
    found = alarms(stack)
    wanted = [(job, "errors", "Errors") for job in JOBS] + [(job, "throttles", "Throttles") for job in JOBS]
    wanted += [(job, "not-run", "Invocations") for job in (*MINUTELY, "retain")]
    for job, name, metric in wanted:
        alarm = found.pop(f"{job}-{name}")
        assert (alarm["Namespace"], alarm["MetricName"], alarm["Statistic"]) == ("AWS/Lambda", metric, "Sum")
        assert alarm["Dimensions"] == [{"Name": "FunctionName", "Value": stack.function(job)}]
        assert alarm["AlarmActions"] == alarm["OKActions"] == [topic]
        assert alarm["TreatMissingData"] == ("breaching" if metric == "Invocations" else "notBreaching")
        assert alarm["DatapointsToAlarm"] <= alarm["EvaluationPeriods"]
        assert alarm["AlarmDescription"]
        # CloudWatch looks back a day at most, or seven in periods of an hour.
        assert alarm["Period"] * alarm["EvaluationPeriods"] <= (7 if alarm["Period"] >= 3600 else 1) * 86_400
    for job in JOBS if stack.name.endswith("prod") else ():
        del found[f"{job}-partial"]
    unread = found.pop("failed-runs-unread")
    assert (unread["Namespace"], unread["MetricName"]) == ("AWS/SQS", "ApproximateNumberOfMessagesVisible")
    assert unread["Dimensions"] == [{"Name": "QueueName", "Value": f"{stack.name}-failed-runs"}]
    assert unread["AlarmActions"] == [topic]
    if stack.name.endswith("prod"):
        for job in ("drain", "ingest"):
            del found[f"{job}-deep"], found[f"{job}-stays-deep"]
        assert found.pop("retry-queue-stays-deep")["AlarmActions"] == [topic]
        assert list(found) == ["retry-queue-deep"]
    else:
        assert found == {}


def test_who_is_on_call_hears_of_runs_that_leave_something_if_there_are_metrics(prod: Stack, dev: Stack) -> None:
    """With the very namespace, name and dimensions that the program prints."""
    found = alarms(prod)
    for job in JOBS:
        alarm = found[f"{job}-partial"]
        printed = json.loads(metrics.line("dlqbatch/prod", job, metrics.figures({"outcome": "partial"})))
        (directive,) = printed["_aws"]["CloudWatchMetrics"]
        assert alarm["Namespace"] == directive["Namespace"]
        assert alarm["MetricName"] in {metric["Name"] for metric in directive["Metrics"]}
        assert printed[alarm["MetricName"]] == [1]
        (dimensions,) = directive["Dimensions"]
        assert {one["Name"]: one["Value"] for one in alarm["Dimensions"]} == {
            name: printed[name] for name in dimensions
        }
        assert (alarm["Statistic"], alarm["Threshold"], alarm["TreatMissingData"]) == ("Sum", 1.0, "notBreaching")
        assert alarm["AlarmActions"] == [prod.outputs["AlertTopic"]]
        assert (alarm["DatapointsToAlarm"], alarm["EvaluationPeriods"]) == ((3, 5) if job in MINUTELY else (1, 1))
    assert [name for name in alarms(dev) if "partial" in name] == []


def test_concurrency_is_reserved_and_what_becomes_of_a_failed_run_is_kept(stack: Stack) -> None:
    functions = stack.client("lambda")
    queue = stack.client("sqs").get_queue_attributes(QueueUrl=stack.outputs["FailedRunsQueue"], AttributeNames=["All"])
    assert queue["Attributes"]["MessageRetentionPeriod"] == "1209600"
    assert queue["Attributes"]["SqsManagedSseEnabled"] == "true"
    drains = 4 if stack.name.endswith("prod") else 2
    for job in JOBS:
        name = stack.function(job)
        reserved = functions.get_function_concurrency(FunctionName=name)["ReservedConcurrentExecutions"]
        assert reserved == (drains if job == "drain" else 1)
        invoked = functions.get_function_event_invoke_config(FunctionName=name)
        assert invoked["DestinationConfig"]["OnFailure"]["Destination"] == queue["Attributes"]["QueueArn"]
        # The next run of a minute is a better second try than a repetition; the next retain is a day away.
        assert invoked["MaximumRetryAttempts"] == (2 if job == "retain" else 0)
        assert invoked["MaximumEventAgeInSeconds"] >= 60


def test_functions_are_in_the_vpc_only_if_one_is_given(prod: Stack, dev: Stack) -> None:
    for job in JOBS:
        inside = prod.client("lambda").get_function(FunctionName=prod.function(job))["Configuration"]["VpcConfig"]
        assert inside["SubnetIds"] == ["subnet-0a1b2c3d", "subnet-4e5f6a7b"]
        assert inside["SecurityGroupIds"] == ["sg-0123abcd"]
        outside = dev.client("lambda").get_function(FunctionName=dev.function(job))["Configuration"]
        assert not outside.get("VpcConfig", {}).get("SubnetIds")


def test_logs_end(prod: Stack, dev: Stack) -> None:
    for stack, days in ((prod, 90), (dev, 7)):
        found = stack.client("logs").describe_log_groups(logGroupNamePrefix=f"/aws/lambda/{stack.name}-")["logGroups"]
        assert {one["logGroupName"]: one["retentionInDays"] for one in found} == {
            f"/aws/lambda/{stack.function(job)}": days for job in JOBS
        }


def test_cold_storage_is_encrypted_private_versioned_and_gets_cheaper(stack: Stack) -> None:
    storage, bucket = stack.client("s3"), stack.outputs["ColdStorageBucket"]
    (rule,) = storage.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    default = rule["ApplyServerSideEncryptionByDefault"]
    if stack.name.endswith("prod"):
        assert (default["SSEAlgorithm"], default["KMSMasterKeyID"]) == ("aws:kms", COLD_KEY)
    else:
        assert default["SSEAlgorithm"] == "AES256"
    blocked = storage.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"]
    assert set(blocked.values()) == {True}
    assert len(blocked) == 4
    owned = storage.get_bucket_ownership_controls(Bucket=bucket)["OwnershipControls"]["Rules"]
    assert owned == [{"ObjectOwnership": "BucketOwnerEnforced"}]
    assert storage.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
    rules = {one["ID"]: one for one in storage.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]}
    assert {one["Status"] for one in rules.values()} == {"Enabled"}
    classes = [(one["Days"], one["StorageClass"]) for one in rules["cheaper"]["Transitions"]]
    assert classes == [(30, "STANDARD_IA"), (90, "GLACIER_IR")]
    assert not any("Expiration" in one for one in rules.values()), "what is in cold storage stays"
    (statement,) = json.loads(storage.get_bucket_policy(Bucket=bucket)["Policy"])["Statement"]
    assert (statement["Effect"], statement["Principal"], statement["Action"]) == ("Deny", "*", "s3:*")
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert statement["Resource"] == [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]


def test_alerts_are_encrypted_with_a_key_that_cloudwatch_may_use(stack: Stack) -> None:
    topic = stack.outputs["AlertTopic"]
    told = stack.client("sns").get_topic_attributes(TopicArn=topic)["Attributes"]
    keys = stack.client("kms")
    (key,) = [
        one["KeyId"] for one in keys.list_keys()["Keys"] if told["KmsMasterKeyId"] in (one["KeyArn"], one["KeyId"])
    ]
    assert keys.get_key_rotation_status(KeyId=key)["KeyRotationEnabled"] is True
    of_key = document(keys.get_key_policy(KeyId=key, PolicyName="default")["Policy"])
    of_topic = document(told["Policy"])
    (of_alarm,) = [one for one in of_key["Statement"] if one["Sid"] == "Alarms"]
    assert of_alarm["Principal"] == {"Service": "cloudwatch.amazonaws.com"}
    assert of_alarm["Action"] == ["kms:Decrypt", "kms:GenerateDataKey*"]
    (alarm,) = [one for one in of_topic["Statement"] if one["Sid"] == "Alarms"]
    assert alarm["Principal"] == {"Service": "cloudwatch.amazonaws.com"}
    assert (alarm["Action"], alarm["Resource"]) == ("sns:Publish", topic)
    pattern = alarm["Condition"]["ArnLike"]["aws:SourceArn"]
    telling = [one["AlarmArn"] for one in alarms(stack).values() if topic in one["AlarmActions"]]
    assert telling
    assert [arn for arn in telling if not arn.startswith(pattern.removesuffix("*"))] == []
    (clear,) = [one for one in of_topic["Statement"] if one["Effect"] == "Deny"]
    assert clear["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}


def test_alerts_go_to_the_address_that_is_given(prod: Stack, dev: Stack) -> None:
    by_topic = {one["TopicArn"]: one for one in prod.client("sns").list_subscriptions()["Subscriptions"]}
    told = by_topic[prod.outputs["AlertTopic"]]
    assert (told["Protocol"], told["Endpoint"]) == ("email", "on-call@example.com")
    assert dev.outputs["AlertTopic"] not in by_topic


def statements(stack: Stack, job: str) -> Iterator[dict[str, Any]]:
    """All that the function's role may and may not do."""
    identities = stack.client("iam")
    role = (
        stack.client("lambda")
        .get_function(FunctionName=stack.function(job))["Configuration"]["Role"]
        .rpartition("/")[2]
    )
    documents = [
        identities.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
        for name in identities.list_role_policies(RoleName=role)["PolicyNames"]
    ]
    for attached in identities.list_attached_role_policies(RoleName=role)["AttachedPolicies"]:
        version = identities.get_policy(PolicyArn=attached["PolicyArn"])["Policy"]["DefaultVersionId"]
        found = identities.get_policy_version(PolicyArn=attached["PolicyArn"], VersionId=version)
        documents.append(found["PolicyVersion"]["Document"])
    trusted = identities.get_role(RoleName=role)["Role"]["AssumeRolePolicyDocument"]["Statement"]
    assert [trusting["Principal"] for trusting in trusted] == [{"Service": "lambda.amazonaws.com"}]
    for one in documents:
        yield from document(one)["Statement"]


def as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else value


def test_each_function_may_do_what_its_job_needs_and_nothing_else(stack: Stack) -> None:
    bucket, topic = f"arn:aws:s3:::{stack.outputs['ColdStorageBucket']}", stack.outputs["AlertTopic"]
    key = stack.client("sns").get_topic_attributes(TopicArn=topic)["Attributes"]["KmsMasterKeyId"]
    secret = "payments/dlqbatch" if stack.name.endswith("prod") else "dlqbatch/dev"
    common = {
        ("secretsmanager:GetSecretValue", f"arn:aws:secretsmanager:{REGION}:123456789012:secret:{secret}-??????"),
        ("sqs:SendMessage", f"arn:aws:sqs:{REGION}:123456789012:{stack.name}-failed-runs"),
    }
    own = {
        "monitor": {("sns:Publish", topic), ("kms:Decrypt", key), ("kms:GenerateDataKey", key)},
        "retain": {
            ("s3:GetObject", f"{bucket}/dlqbatch/*"),
            ("s3:PutObject", f"{bucket}/dlqbatch/*"),
            ("s3:ListBucket", bucket),
        },
    }
    if stack.name.endswith("prod"):
        common |= {("kms:Decrypt", SECRET_KEY), ("secretsmanager:GetSecretValue", DATABASE_SECRET)}
        own["retain"] |= {("kms:Decrypt", COLD_KEY), ("kms:GenerateDataKey", COLD_KEY)}
    for job in JOBS:
        # AWS ends the ARN of a log group with `:*`, its streams; moto does not.
        logs = f"arn:aws:logs:{REGION}:123456789012:log-group:/aws/lambda/{stack.function(job)}"
        found = {
            (action, resource.removesuffix(":*"))
            for one in statements(stack, job)
            if one["Effect"] == "Allow" and one.get("Sid") != "NetworkInterfaces"
            for action in as_list(one["Action"])
            for resource in as_list(one["Resource"])
        }
        writing = {("logs:CreateLogStream", logs), ("logs:PutLogEvents", logs)}
        assert found == common | writing | own.get(job, set()), job
        assert not any(resource == "*" or action.endswith("*") for action, resource in found)


def test_cold_storage_is_used_in_this_account_and_below_its_prefix_only(stack: Stack) -> None:
    found = [one for one in statements(stack, "retain") if "s3:" in json.dumps(one["Action"])]
    assert len(found) == 2
    for one in found:
        assert one["Condition"]["StringEquals"] == {"aws:ResourceAccount": "123456789012"}
        listing = one["Action"] == "s3:ListBucket"
        assert one["Condition"].get("StringLike") == ({"s3:prefix": "dlqbatch/*"} if listing else None)


def test_only_in_a_vpc_lambda_may_make_network_interfaces_and_the_program_still_may_not(
    prod: Stack, dev: Stack
) -> None:
    for job in JOBS:
        found = {one["Sid"]: one for one in statements(prod, job) if "NetworkInterfaces" in one.get("Sid", "")}
        allowed, denied = found["NetworkInterfaces"], found["NetworkInterfacesAreNotForTheProgram"]
        assert (allowed["Effect"], denied["Effect"]) == ("Allow", "Deny")
        assert allowed["Action"] == denied["Action"]
        assert {action.partition(":")[0] for action in allowed["Action"]} == {"ec2"}
        functions = f"arn:aws:lambda:{REGION}:123456789012:function:dlqbatch-prod-*"
        assert denied["Condition"] == {"ArnLike": {"lambda:SourceFunctionArn": functions}}
        assert not any("ec2" in json.dumps(one) for one in statements(dev, job))
