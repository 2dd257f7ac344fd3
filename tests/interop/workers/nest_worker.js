// A worker of NestJS with the code of docs/clients/nestjs.md and the recipe of docs/failure-contract.md, which the test
// has written beside its `calls`. The argument is `microservices` or `golevelup`.
require("reflect-metadata");
const { readFileSync } = require("fs");
const { Module } = require("@nestjs/common");
const { NestFactory } = require("@nestjs/core");
const { work } = require("./failing_work.js");

const folder = process.env.WORK_FOLDER;
const code = readFileSync(`${folder}/recipe.js`, "utf8") + readFileSync(`${folder}/page.js`, "utf8");
const urls = [process.env.AMQP_URL];

// What TypeScript makes of `@decorator` before a method.
const decorate = (decorator, type, name) =>
  decorator(type.prototype, name, Object.getOwnPropertyDescriptor(type.prototype, name));

class Orders {
  handle(order) {
    work(order.name);
  }
}

async function microservices() {
  const { EventPattern, Transport } = require("@nestjs/microservices");
  const { Controller } = require("@nestjs/common");
  const { HandOverFailures } = new Function("require", `${code}; return { HandOverFailures };`)(require);
  decorate(EventPattern("order.created"), Orders, "handle");
  Controller()(Orders);
  class App {}
  Module({ controllers: [Orders] })(App);
  const options = { urls, queue: "orders", noAck: false, queueOptions: { durable: true } };
  const app = await NestFactory.createMicroservice(App, { transport: Transport.RMQ, options });
  app.useGlobalInterceptors(new HandOverFailures("orders"));
  await app.listen();
}

async function golevelup() {
  const { RabbitMQModule, RabbitSubscribe } = require("@golevelup/nestjs-rabbitmq");
  const { handOverFailures } = new Function("require", `${code}; return { handOverFailures };`)(require);
  const subscription = { exchange: "shop", routingKey: "#", queue: "orders", errorHandler: handOverFailures("orders") };
  decorate(RabbitSubscribe(subscription), Orders, "handle");
  class App {}
  const exchanges = [{ name: "shop", type: "topic" }];
  Module({ imports: [RabbitMQModule.forRoot({ uri: urls[0], exchanges })], providers: [Orders] })(App);
  await (await NestFactory.createApplicationContext(App)).init();
}

({ microservices, golevelup })[process.argv[2]]();
