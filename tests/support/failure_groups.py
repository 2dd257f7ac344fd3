"""The true groups of `failures`: forty ways to fail, each told as often as any other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """One true group: what is raised, what it says, and where; no place means that no stack is sent."""

    name: str
    origin: str
    type: str
    text: str
    place: str = ""
    through: tuple[str, ...] = ()
    """Frames of frameworks, nearer to the failure than the place."""


JAVA = [
    Group(
        "take-null",
        "orders",
        "java.lang.NullPointerException",
        'Cannot invoke "Order.id()" because "order" is null',
        "shop.stock.Stock.take",
    ),
    Group(
        "give-null",
        "orders",
        "java.lang.NullPointerException",
        'Cannot invoke "Order.id()" because "order" is null',
        "shop.stock.Stock.give",
    ),
    Group("take-state", "orders", "java.lang.IllegalStateException", "no stock for {id}", "shop.stock.Stock.take"),
    Group(
        "pay-time-out",
        "payments",
        "java.net.SocketTimeoutException",
        "Read timed out",
        "shop.pay.Bank.charge",
        (
            "java.base/java.net.SocketInputStream.socketRead0",
            "java.base/java.net.SocketInputStream.read",
            "org.apache.http.impl.io.SessionInputBufferImpl.fill",
            "org.springframework.web.client.RestTemplate.doExecute",
        ),
    ),
    Group(
        "refund-time-out",
        "payments",
        "java.net.SocketTimeoutException",
        "Read timed out",
        "shop.pay.Bank.refund",
        ("java.base/java.net.SocketInputStream.read", "org.springframework.web.client.RestTemplate.doExecute"),
    ),
    Group(
        "duplicate-order",
        "orders",
        "org.springframework.dao.DuplicateKeyException",
        "Duplicate entry '{id}' for key 'PRIMARY'",
        "shop.order.Orders$Writer.insert",
        ("org.springframework.jdbc.support.SQLErrorCodeSQLExceptionTranslator.doTranslate",),
    ),
    Group(
        "order-deadlock",
        "orders",
        "org.springframework.dao.DeadlockLoserDataAccessException",
        "Deadlock found; transaction {n}",
        "shop.order.Orders$Writer.insert",
        ("org.springframework.jdbc.support.SQLErrorCodeSQLExceptionTranslator.doTranslate",),
    ),
    Group(
        "parse-order",
        "orders",
        "com.fasterxml.jackson.databind.exc.MismatchedInputException",
        "Cannot deserialize `int` from {json}",
        "shop.order.Reader.lambda$read$",
        ("com.fasterxml.jackson.databind.ObjectMapper.readValue",),
    ),
    Group("no-mail", "mails", "shop.mail.NoSuchAddress", "{mail} does not exist", "shop.mail.Sender.send"),
    Group("spring-told-gateway", "invoices", "", "I/O error on POST request for {url}: Read timed out"),
    Group("spring-told-refused", "invoices", "", "Connection to {host}:{port} refused after {ms}"),
    Group("spring-told-row", "ledger", "", "Row {n} of {path} has {n} columns since {date}"),
]

DOTNET = [
    Group(
        "ship-null",
        "shipping",
        "System.NullReferenceException",
        "Object reference not set to an instance of an object.",
        "Shop.Shipping.Planner.Plan(Order order)",
    ),
    Group(
        "ship-label",
        "shipping",
        "System.ArgumentException",
        "Label {hex} is not known (Parameter 'label')",
        "Shop.Shipping.Planner.Print(String label, Int32 copies)",
    ),
    Group(
        "ship-time-out",
        "shipping",
        "System.TimeoutException",
        "The operation has timed out after {ms}.",
        "Shop.Shipping.Carrier.<CallAsync>d__#.MoveNext()",
        ("System.Net.Http.HttpClient.SendAsync(HttpRequestMessage request)",),
    ),
    Group(
        "book-time-out",
        "booking",
        "System.TimeoutException",
        "The operation has timed out after {ms}.",
        "Shop.Booking.Desk.<>c__DisplayClass#_0.<Book>b__#(Int32 room)",
    ),
    Group(
        "book-sql",
        "booking",
        "Microsoft.Data.SqlClient.SqlException",
        "Cannot insert duplicate key row. The duplicate key value is ({n}).",
        "Shop.Booking.Store`1.Save(T item)",
        ("Microsoft.Data.SqlClient.SqlCommand.ExecuteNonQuery()", "Dapper.SqlMapper.Execute(IDbConnection cnn)"),
    ),
    Group(
        "book-deadlock",
        "booking",
        "Shop.Booking.Locked+ByOther",
        "Room {n} is locked until {time}",
        "Shop.Booking.Store`1.Save(T item)",
    ),
    Group(
        "rate-key",
        "rates",
        "System.Collections.Generic.KeyNotFoundException",
        "The given key '{word}' was not present in the dictionary.",
        "Shop.Rates.Table.Find(String currency)",
        ("System.Collections.Generic.Dictionary`2.get_Item(TKey key)",),
    ),
    Group(
        "rate-http",
        "rates",
        "System.Net.Http.HttpRequestException",
        "Response status code does not indicate success: 503 (Service Unavailable).",
        "Shop.Rates.Client.<LoadAsync>d__#.MoveNext()",
        ("System.Net.Http.HttpResponseMessage.EnsureSuccessStatusCode()",),
    ),
    Group(
        "rate-json",
        "rates",
        "System.Text.Json.JsonException",
        "The JSON value could not be converted. Path: $.rates[{n}] | LineNumber: {n} | BytePositionInLine: {n}.",
        "",
        ("System.Text.Json.ThrowHelper.ReThrow()", "MassTransit.Serialization.Deserialize()"),
    ),
    Group(
        "stamp-json",
        "stamps",
        "System.Text.Json.JsonException",
        "The JSON value could not be converted. Path: $.rates[{n}] | LineNumber: {n} | BytePositionInLine: {n}.",
        "",
        ("System.Text.Json.ThrowHelper.ReThrow()", "MassTransit.Serialization.Deserialize()"),
    ),
    Group(
        "no-saga",
        "sagas",
        "Shop.Sagas.NotThere",
        "No saga {uuid} for {mail} at {ip}",
        "Shop.Sagas.Finder.Find[TSaga](Guid id)",
    ),
]

PYTHON = [
    Group("resize-value", "images", "ValueError", "cannot resize to {n}x{n}", "images/resize.py:shrink"),
    Group("resize-key", "images", "KeyError", "'{word}'", "images/resize.py:shrink"),
    Group("crop-key", "images", "KeyError", "'{word}'", "images/crop.py:crop"),
    Group(
        "upload-refused",
        "images",
        "requests.exceptions.ConnectionError",
        "HTTPSConnectionPool(host='{host}', port={port}): Max retries exceeded with url: {url}",
        "images/upload.py:put",
        ("requests/adapters.py:send", "requests/sessions.py:request"),
    ),
    Group(
        "upload-429",
        "images",
        "requests.exceptions.HTTPError",
        "429 Client Error: Too Many Requests for url: {url}",
        "images/upload.py:put",
        ("requests/models.py:raise_for_status",),
    ),
    Group(
        "report-sql",
        "reports",
        "sqlalchemy.exc.OperationalError",
        "(psycopg.OperationalError) connection to server at {ip}, port {port} failed",
        "reports/build.py:rows",
        ("sqlalchemy/engine/base.py:_execute_context",),
    ),
    Group(
        "report-empty",
        "reports",
        "reports.errors.NothingToReport",
        "no rows for {mail} since {date}",
        "reports/build.py:rows",
    ),
    Group("report-deep", "reports", "RecursionError", "maximum recursion depth exceeded", "reports/tree.py:Tree.walk"),
    Group(
        "index-json",
        "search",
        "json.decoder.JSONDecodeError",
        "Expecting value: line {n} column {n} (char {n})",
        "search/index.py:read",
        ("json/decoder.py:raw_decode",),
    ),
    Group("index-memory", "search", "MemoryError", "", "search/index.py:build"),
    Group(
        "mail-type",
        "mailing",
        "TypeError",
        "unsupported operand type(s) for +: 'int' and 'str'",
        "mailing/letter.py:<lambda>",
    ),
]
# Told without a stack, some of it by no frame of the application: only the text can tell these apart.
TOLD = [
    Group(
        "told-pay-declined",
        "payments",
        "shop.Declined",
        "Payment {uuid} over {amount} was declined by {host} at {time}",
    ),
    Group(
        "told-pay-limit", "payments", "shop.Declined", "Limit of {amount} reached for account {hex}; try after {date}"
    ),
    Group("told-404", "web", "shop.HttpFailed", "Request failed with status code 404 for {url} ({ms})"),
    Group("told-503", "web", "shop.HttpFailed", "Request failed with status code 503 for {url} ({ms})"),
    Group("told-payload", "web", "shop.Refused", "Payload {json} refused by {ip}:{port}, trace 0x{hex}"),
    # A name that nothing marks as one: masks cannot see it, so the group falls apart.
    Group("told-name", "people", "shop.NoSuchPerson", "customer {name} is not known in branch {n}"),
]
