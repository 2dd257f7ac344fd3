// What the workers for Node do: six causes of failure, and a message that fails at its first try alone.
const { appendFileSync, existsSync, readFileSync } = require("fs");

const folder = process.env.WORK_FOLDER;

class CustomError extends Error {
  constructor(name, message) {
    super(message);
    this.name = name;
  }
}
const checkAmount = (number) => { throw new RangeError(`amount of order ${number} is negative`); };
const checkAccount = (number) => { throw new RangeError(`account of order ${number} is overdrawn`); };

function fail(name) {
  const [cause, number] = name.split("-");
  if (cause === "declined" || cause === "once") throw new CustomError("PaymentDeclined", `card of order ${number} declined`);
  if (cause === "refused") throw new CustomError("ConnectionRefused", "connect ECONNREFUSED 10.0.0.1:5432");
  if (cause === "missing") return undefined.total;
  if (cause === "late") throw new CustomError("TimeoutError", `no answer for order ${number}`);
  if (cause === "negative") checkAmount(number);
  checkAccount(number);
}

function work(name) {
  const calls = existsSync(`${folder}/calls`) ? readFileSync(`${folder}/calls`, "utf8").split(/\s/) : [];
  const isHandled = existsSync(`${folder}/mended`) || (name.startsWith("once") && calls.includes(name));
  appendFileSync(`${folder}/calls`, `${name} ${isHandled ? "handled" : "failed"}\n`);
  if (!isHandled) fail(name);
}

module.exports = { work };
