// A service of moleculer with the code of docs/clients/moleculer.md and the recipe of docs/failure-contract.md, which
// the test has written beside its `calls`. It publishes the names that it is started with.
const { readFileSync } = require("fs");
const { ServiceBroker } = require("moleculer");
const { Middleware } = require("@moleculer/channels");
const { work } = require("./failing_work.js");

const folder = process.env.WORK_FOLDER;
const code = readFileSync(`${folder}/recipe.js`, "utf8") + readFileSync(`${folder}/page.js`, "utf8");
const { service, adapter } = new Function("require", "url", "work", `${code}; return { service, adapter };`)(
  require, process.env.AMQP_URL, (order) => work(order.name),
);

(async () => {
  const broker = new ServiceBroker({ logLevel: "error", middlewares: [Middleware({ adapter })] });
  broker.createService(service);
  await broker.start();
  for (const name of process.argv.slice(2)) await broker.sendToChannel("orders", { name });
})();
