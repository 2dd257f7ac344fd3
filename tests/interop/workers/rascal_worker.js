// A worker of rascal: it annotates a failed message by `republish` with `immediateNack`, so that the broker dead-letters
// the copy, with its error in a header.
const { BrokerAsPromised } = require("rascal");
const { work } = require("./failing_work.js");

const toDlqbatch = { "x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key" };
const config = { vhosts: { "/": {
  connection: { url: process.env.AMQP_URL },
  exchanges: { shop: { type: "topic" } },
  queues: { orders: { options: { arguments: toDlqbatch } } },
  bindings: ["shop[#] -> orders"],
  publications: { orders: { exchange: "shop", routingKey: "order.created" } },
  subscriptions: { orders: { queue: "orders", contentType: "text/plain" } },
} } };

(async () => {
  const broker = await BrokerAsPromised.create(config);
  broker.on("error", console.error);
  for (const name of process.argv.slice(2)) await broker.publish("orders", name);
  const subscription = await broker.subscribe("orders");
  subscription.on("message", (message, content, ackOrNack) => {
    try {
      work(content.toString());
    } catch (error) {
      error.code = error.name;
      ackOrNack(error, { strategy: "republish", immediateNack: true });
      return;
    }
    ackOrNack();
  });
  subscription.on("error", console.error);
})();
