// A certified OpenID Connect provider on loopback: node provider.mjs MODULES PORT BACK KEY [SECONDS BEHIND]
import { createRequire } from "node:module";
import { generateKeyPairSync } from "node:crypto";
import { pathToFileURL } from "node:url";

const [modules, port, back, kid, behind = "0"] = process.argv.slice(2);
const now = Date.now;
Date.now = () => now() - Number(behind) * 1000;

const found = createRequire(`${modules}/package.json`).resolve("oidc-provider");
const { Provider } = await import(pathToFileURL(found).href);
const { privateKey } = generateKeyPairSync("rsa", { modulusLength: 2048 });

const people = {
  ann: { email: "ann@example.org", email_verified: true, groups: ["payments", "ops"] },
  eve: { email: "ann@example.org", email_verified: false, groups: [] },
};
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{ client_id: "dlqbatch", client_secret: "not-so-secret-here", redirect_uris: [back] }],
  jwks: { keys: [{ ...privateKey.export({ format: "jwk" }), kid, use: "sig", alg: "RS256" }] },
  ttl: { IdToken: 60, Interaction: 3600, Session: 3600, Grant: 3600, AccessToken: 60 },
  cookies: { keys: ["for a test"] },
  claims: { openid: ["sub"], profile: ["groups"], email: ["email", "email_verified"] },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, ...people[id] }) }),
});
provider.listen(Number(port), "127.0.0.1", () => console.log("ready"));
