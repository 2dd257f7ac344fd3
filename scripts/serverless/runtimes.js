"use strict";

// The last free release of serverless knows no Python newer than 3.11 and would refuse the ones that AWS supports.
// It is only its list that is old: what it makes of a runtime is its name in the template.
class Runtimes {
  constructor(serverless) {
    const known = serverless.configSchemaHandler.schema.definitions.awsLambdaRuntime.enum;
    for (const runtime of ["python3.12", "python3.13"]) {
      if (!known.includes(runtime)) known.push(runtime);
    }
  }
}

module.exports = Runtimes;
