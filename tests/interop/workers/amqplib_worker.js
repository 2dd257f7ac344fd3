// A worker with the recipe of docs/failure-contract.md, which the test has written beside its `calls`. With the argument
// `manager` its channel is one of amqp-connection-manager.
const { readFileSync } = require("fs");
const { connect } = require("amqplib");
const { work } = require("./failing_work.js");

const folder = process.env.WORK_FOLDER;
const recipe = readFileSync(`${folder}/recipe.js`, "utf8");
const handOver = new Function(`${recipe}; return handOver;`)();

const consume = async (channel) => {
  channel.on("return", () => process.exit(1));
  await channel.consume("orders", async (message) => {
    try {
      work(message.content.toString());
    } catch (error) {
      await handOver(channel, "orders", message, error);
      return;
    }
    channel.ack(message);
  });
};

(async () => {
  if (process.argv[2] === "manager") {
    const manager = require("amqp-connection-manager").connect([process.env.AMQP_URL]);
    await manager.createChannel({ setup: consume }).waitForConnect();
  } else {
    await consume(await (await connect(process.env.AMQP_URL)).createConfirmChannel());
  }
})();
