// Process of a graph in onnxruntime-node or onnxruntime-web (WebAssembly on the CPU):
//
//     node worker.mjs PACKAGE GRAPH DIRECTORY
//
// PACKAGE is the directory of the npm package. ../worker.py documents the protocol.

import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname, join } from "node:path";
import { createInterface } from "node:readline";

const [packageDirectory, graph, directory] = process.argv.slice(2);

// stdout is reserved for responses.
console.log = console.info = console.debug = console.error;

function reply(content) {
  process.stdout.write(JSON.stringify(content) + "\n");
}

async function openSession(ort) {
  if (basename(packageDirectory) === "onnxruntime-node") {
    return ort.InferenceSession.create(graph);
  }
  // WebAssembly has no file system: pass the graph and its external files as bytes.
  ort.env.wasm.numThreads = 1;
  const bytes = readFileSync(graph);
  const externalData = readdirSync(dirname(graph))
    .filter((name) => name !== basename(graph) && bytes.includes(name))
    .map((name) => ({ path: name, data: new Uint8Array(readFileSync(join(dirname(graph), name))) }));
  return ort.InferenceSession.create(new Uint8Array(bytes), { executionProviders: ["wasm"], externalData });
}

function readTensor(ort, name, [type, ...shape]) {
  const { buffer } = new Uint8Array(readFileSync(join(directory, `${name}.bin`)));
  const values = type === "int64" ? new BigInt64Array(buffer) : new Float32Array(buffer);
  return new ort.Tensor(type, values, shape);
}

function writeTensor(tensor, index) {
  const { buffer, byteOffset, byteLength } = tensor.data;
  writeFileSync(join(directory, `${index}.bin`), new Uint8Array(buffer, byteOffset, byteLength));
  return tensor.dims;
}

try {
  const ort = createRequire(join(packageDirectory, "package.json"))(packageDirectory);
  const session = await openSession(ort);
  reply({});
  for await (const line of createInterface({ input: process.stdin })) {
    const described = Object.entries(JSON.parse(line));
    const feed = Object.fromEntries(described.map(([name, entry]) => [name, readTensor(ort, name, entry)]));
    const results = await session.run(feed);
    reply({ outputs: session.outputNames.map((name, index) => writeTensor(results[name], index)) });
  }
} catch (error) {
  reply({ error: String(error).replace(/\s+/g, " ") });
}
