// Calls of a server in Node.js and in a browser. `node scenarios.mjs URL-OF-LIBRARY` reads a scenario from stdin.

/** Make calls, each a method and its arguments, and return their results or errors as JSON. */
export async function calls(lib, options, list) {
  const client = new lib.AttnlensClient(options);
  const outcomes = [];
  for (const [method, ...parameters] of list) {
    try {
      outcomes.push({ value: plain(await resultOf(client[method](...parameters))) });
    } catch (error) {
      outcomes.push({ error: { ...error, name: error.name, message: error.message, isBase: error instanceof lib.AttnlensError } });
    }
  }
  return outcomes;
}

async function resultOf(result) {
  if (!(Symbol.asyncIterator in result)) return await result;
  const parts = [];
  for await (const part of result) parts.push(part);
  return parts;
}

/** Read one part of a stream, then leave the loop. */
export async function leftStream(lib, options, inputs) {
  for await (const part of new lib.AttnlensClient(options).encodeStream(inputs, { attention: [{}] })) return part.input_index;
}

/** Read one part of a stream, then abort it. */
export async function abortedStream(lib, options, inputs) {
  const controller = new AbortController();
  const { signal } = controller;
  try {
    for await (const _ of new lib.AttnlensClient(options).encodeStream(inputs, { attention: [{}], signal })) controller.abort();
  } catch (error) {
    return error.name;
  }
}

/**
 * Call a server that streams occupy completely, until the call was rejected once. Each stream waits to be read, and
 * keeps the slot of its text. Return the first error, and the number of requests.
 */
export async function overloaded(lib, options, inputs) {
  const client = new lib.AttnlensClient({ ...options, maxRetries: 0 });
  const holders = inputs.map((input) => client.encodeStream(input, { attention: [{}] }));
  for (const holder of holders) await holder.next();
  const { name, status, retryAfterMs } = await client.attention("a").catch((error) => error);
  let count = 0;
  async function countedFetch(url, init) {
    const response = await fetch(url, init);
    if (++count === 1) for (const holder of holders) await holder.return();
    return response;
  }
  const patient = new lib.AttnlensClient({ ...options, fetch: countedFetch, maxRetries: 20 });
  const { results } = await patient.attention("a");
  return { error: { name, status, retryAfterMs }, count, numLayers: results[0].attention[0].layers.length };
}

/** Return the class name of each reason. */
export function classes(lib) {
  return Object.fromEntries(Object.entries(lib.ERROR_CLASSES).map(([reason, kind]) => [reason, new kind("").name]));
}

/** Replace arrays by their shapes, types and bytes. */
function plain(value) {
  if (ArrayBuffer.isView(value)) {
    const bytes = new Uint8Array(value.buffer, value.byteOffset, value.byteLength);
    return { type: value.constructor.name, hex: Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("") };
  }
  if (typeof value !== "object" || value === null) return value;
  if (Array.isArray(value)) return value.map(plain);
  const isTensor = value.data !== undefined && value.shape !== undefined;
  return isTensor ? { shape: value.shape, ...plain(value.data) } : Object.fromEntries(Object.entries(value).map(([key, each]) => [key, plain(each)]));
}

if (typeof process !== "undefined" && import.meta.url === `file://${process.argv[1]}`) {
  const scenarios = { abortedStream, calls, classes, leftStream, overloaded };
  let text = "";
  for await (const part of process.stdin) text += part;
  const [name, ...parameters] = JSON.parse(text);
  console.log(JSON.stringify(await scenarios[name](await import(process.argv[2]), ...parameters)));
}
