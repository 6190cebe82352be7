// Call functions of a module here: `node call.mjs MODULE CALLS RESULTS`.
//
// CALLS is a JSON file with a list of `[function, arguments]`; their results go to the JSON file RESULTS.

import { readFileSync, writeFileSync } from "node:fs";

const [, , name, calls, results] = process.argv;
const module = await import(`./${name}.mjs`);
const returned = [];
for (const [function_, arguments_] of JSON.parse(readFileSync(calls))) {
  returned.push(await module[function_](arguments_));
}
writeFileSync(results, JSON.stringify(returned));
