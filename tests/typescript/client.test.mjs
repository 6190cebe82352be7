// Behavior of the client that needs no server: `node --test client.test.mjs`.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";
import * as lib from "../../client/typescript/lib/index.js";

const OVERLOADED = { error: "full: try again", reason: "OVERLOADED" };
const TEXT = { tokens: [] };
const OK = { results: [TEXT] };
const EXPLANATION = { tokens: [], unit_ids: [], target_value: 0.5, scores: [] };

/** The first part of a text in a stream. */
function first(input_index, num_attention_parts = 0) {
  return { input_index, text: TEXT, num_attention_parts };
}

/** Lines of a stream. */
function linesOf(...parts) {
  return parts.map((part) => `${JSON.stringify(part)}\n`).join("");
}

/** A function like `fetch` that returns the given responses one after the other, and the requests that it received. */
function scripted(...responses) {
  const requests = [];
  const fetch = async (url, init) => {
    requests.push({ url, at: performance.now(), ...init });
    init.signal.throwIfAborted();
    const next = responses.length > 1 ? responses.shift() : responses[0];
    return typeof next === "function" ? next(init) : next.clone();
  };
  return { fetch, requests };
}

function reply(body, status = 200, headers = {}) {
  return new Response(typeof body === "string" ? body : JSON.stringify(body), { status, headers });
}

function hang({ signal }) {
  return new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
}

function clientOf(script, options = {}) {
  return new lib.AttnlensClient({ baseUrl: "http://server/", fetch: script.fetch, ...options });
}

async function failureOf(promise) {
  return promise.then(() => assert.fail("no error"), (error) => error);
}

test("requests contain the inputs as a list, the options and the key", async () => {
  const script = scripted(reply({ results: [EXPLANATION] }));
  const client = clientOf(script, { apiKey: "k", headers: { "X-Request-Id": "a" } });
  const direction = Float32Array.of(0.1, -2);
  await client.explain("It rained.", { direction, truncate: true });
  const { url, method, headers, body, redirect } = script.requests[0];
  assert.equal(redirect, "error"); // another host would receive the key
  assert.equal(url, "http://server/v1/attnlens/explain");
  assert.equal(method, "POST");
  assert.deepEqual(headers, { "Content-Type": "application/json", Authorization: "Bearer k", "X-Request-Id": "a" });
  const sent = JSON.parse(body);
  assert.deepEqual(Float32Array.from(sent.direction), direction);
  delete sent.direction;
  assert.deepEqual(sent, { arrays: "base64", inputs: ["It rained."], truncate: true });
});

test("an overloaded server is called again after its delay, with jitter", async () => {
  const script = scripted(reply(OVERLOADED, 429, { "Retry-After": "9", "Retry-After-Ms": "50" }), reply(OK));
  await clientOf(script).encode(["a"]);
  const [one, two] = script.requests;
  assert.ok(two.at - one.at >= 50 + 100 - 5); // half of the first backoff; timers may be early
});

for (const [status, headers, count] of [
  [429, {}, 2],
  [502, {}, 2],
  [500, {}, 1],
  [400, {}, 1],
  [500, { "X-Should-Retry": "true" }, 2],
  [503, { "X-Should-Retry": "false" }, 1],
  [503, { "X-Should-Retry": "false", "Retry-After-Ms": "1" }, 1],
  [500, { "Retry-After": "0" }, 2],
]) {
  test(`status ${status} with ${JSON.stringify(headers)} leads to ${count} requests`, async () => {
    const script = scripted(reply("<html>", status, headers));
    const error = await failureOf(clientOf(script, { maxRetries: 1 }).encode(["a"]));
    assert.equal(script.requests.length, count);
    assert.equal(error.constructor, lib.AttnlensError);
    assert.equal(error.message, `the server responded with status ${status}`);
  });
}

test("the delay of the server is read from each header", async () => {
  const date = new Date(Date.now() + 60_000).toUTCString();
  for (const [headers, low, high] of [
    [{ "Retry-After": "2" }, 2000, 2000],
    [{ "Retry-After-Ms": "250", "Retry-After": "1" }, 250, 250],
    [{ "Retry-After": date }, 50_000, 60_000],
    [{ "Retry-After": "Mon, 01 Jan 2001 00:00:00 GMT" }, 0, 0],
  ]) {
    const script = scripted(reply(OVERLOADED, 429, headers));
    const error = await failureOf(clientOf(script, { maxRetries: 0 }).encode(["a"]));
    assert.ok(error instanceof lib.OverloadedError);
    assert.ok(low <= error.retryAfterMs && error.retryAfterMs <= high);
  }
  const script = scripted(reply(OVERLOADED, 429, { "Retry-After": "soon" }));
  assert.equal((await failureOf(clientOf(script, { maxRetries: 0 }).encode(["a"]))).retryAfterMs, null);
});

test("no retry starts that would exceed the time limit", async () => {
  const script = scripted(reply(OVERLOADED, 429, { "Retry-After": "60" }));
  const error = await failureOf(clientOf(script, { timeoutMs: 30_000 }).encode(["a"]));
  assert.ok(error instanceof lib.OverloadedError);
  assert.equal(script.requests.length, 1);
});

test("aborted calls reject with the reason and are not retried", async () => {
  const waiting = new AbortController();
  const script = scripted(reply(OVERLOADED, 429, { "Retry-After": "60" }));
  const call = failureOf(clientOf(script, { timeoutMs: 3_600_000 }).encode(["a"], { signal: waiting.signal }));
  setTimeout(() => waiting.abort("left the page"), 20);
  assert.equal(await call, "left the page");
  assert.equal(script.requests.length, 1);

  const running = new AbortController();
  const hanging = scripted(hang);
  const second = failureOf(clientOf(hanging).embed(["a"], { signal: running.signal }));
  setTimeout(() => running.abort(), 20);
  assert.equal((await second).name, "AbortError");
  assert.equal(hanging.requests.length, 1);

  const unused = scripted(reply(OK));
  assert.equal((await failureOf(clientOf(unused).encode(["a"], { signal: running.signal }))).name, "AbortError");
  assert.equal(unused.requests.length, 0);
});

test("a call that takes too long is an error", async () => {
  const error = await failureOf(clientOf(scripted(hang), { timeoutMs: 20 }).encode(["a"]));
  assert.ok(error instanceof lib.DeadlineExceededError);
  assert.equal(error.message, "no response within 20 ms: check that the server is reachable, or use a larger timeoutMs");
});

test("failed connections are retried", async () => {
  const cause = new TypeError("fetch failed");
  const fail = () => Promise.reject(cause);
  const script = scripted(fail, reply(OK));
  await clientOf(script).encode(["a"]);
  assert.equal(script.requests.length, 2);
  const error = await failureOf(clientOf(scripted(fail), { maxRetries: 0 }).encode(["a"]));
  assert.ok(error instanceof lib.ConnectionError);
  assert.deepEqual([error.status, error.reason, error.cause], [0, "", cause]);
});

test("errors have the class of their reason and the fields of the response", async () => {
  const violations = [{ field: "inputs[0]", description: "has 300 tokens" }];
  const body = { error: "too long", reason: "INPUT_TOO_LONG", violations, metadata: { num_tokens: "300" } };
  const error = await failureOf(clientOf(scripted(reply(body, 400, { "X-Request-Id": "r1" }))).embed("a"));
  assert.ok(error instanceof lib.InputTooLongError);
  const { name, message, status, reason, requestId, metadata, retryable, retryAfterMs } = error;
  assert.deepEqual([name, message, status], ["InputTooLongError", "too long", 400]);
  assert.deepEqual([reason, requestId, retryable, retryAfterMs], ["INPUT_TOO_LONG", "r1", false, null]);
  assert.deepEqual([error.violations, metadata], [violations, body.metadata]);
  const inherited = await failureOf(clientOf(scripted(reply({ error: "x", reason: "constructor" }, 400))).embed("a"));
  assert.equal(inherited.constructor, lib.AttnlensError);
});

test("errors of other programs have a message", async () => {
  for (const body of [{ error: { message: "x" }, reason: {} }, [], null, "x", { detail: "x" }]) {
    const error = await failureOf(clientOf(scripted(reply(body, 404))).embed("a"));
    assert.equal(error.constructor, lib.AttnlensError);
    assert.deepEqual([error.message, error.reason], ["the server responded with status 404", ""]);
  }
});

test("an invalid response is an error that is not retried", async () => {
  const script = scripted(reply("<html>"));
  const error = await failureOf(clientOf(script).encode(["a"]));
  assert.ok(error instanceof lib.BadResponseError);
  assert.equal(script.requests.length, 1);
  assert.ok((await failureOf(clientOf(scripted(reply({}))).embed(["a"]))) instanceof lib.BadResponseError);
});

/** A response whose body arrives in parts of some bytes. */
function streamed(text, size, onCancel) {
  const bytes = new TextEncoder().encode(text);
  const parts = Array.from({ length: Math.ceil(bytes.length / size) }, (_, index) => bytes.slice(index * size, (index + 1) * size));
  const pull = (controller) => (parts.length ? controller.enqueue(parts.shift()) : controller.close());
  return () => new Response(new ReadableStream({ pull, cancel: onCancel }, { highWaterMark: 0 }));
}

test("lines of a stream are independent of the parts in which they arrive", async () => {
  const lines = [{ ...first(0), model: "Füße 東京 😀" }, first(1), first(2)];
  const text = linesOf(...lines);
  for (const size of [1, 2, 3, 7, 1000]) {
    const parts = [];
    for await (const part of clientOf(scripted(streamed(text, size))).encodeStream(["a", "b", "c"])) parts.push(part);
    assert.deepEqual(parts, lines);
  }
});

test("an error within a stream is thrown after the parts before it", async () => {
  const text = linesOf(first(0), { error: "gone", reason: "INTERNAL", metadata: { error_id: "x" } });
  const script = scripted(streamed(text, 5));
  const stream = clientOf(script).encodeStream(["a"]);
  assert.deepEqual((await stream.next()).value, first(0));
  const error = await failureOf(stream.next());
  assert.ok(error instanceof lib.InternalError);
  assert.deepEqual([error.status, error.metadata.error_id, script.requests.length], [200, "x", 1]);
});

test("a stream that ends within a line is an error", async () => {
  const stream = clientOf(scripted(streamed(`${linesOf(first(0))}{"input`, 1000))).encodeStream(["a"]);
  await stream.next();
  assert.ok((await failureOf(stream.next())) instanceof lib.BadResponseError);
});

test("leaving the loop aborts the request", async () => {
  let isCancelled = false;
  const script = scripted(streamed(linesOf(first(0), first(1)), 40, () => (isCancelled = true)));
  for await (const part of clientOf(script).encodeStream(["a", "b"])) {
    assert.equal(part.input_index, 0);
    assert.equal(script.requests[0].signal.aborted, false);
    break;
  }
  assert.equal(script.requests[0].signal.aborted, true);
  assert.equal(isCancelled, true);
});

test("the time limit of a stream applies to each wait, not to the caller", async () => {
  const script = scripted(streamed(linesOf(first(0), first(1), first(2)), 40));
  let count = 0;
  for await (const _ of clientOf(script, { timeoutMs: 200 }).encodeStream(["a", "b", "c"])) {
    await new Promise((resolve) => setTimeout(resolve, 250));
    count++;
  }
  assert.equal(count, 3);
  const hanging = () => new Response(new ReadableStream());
  const stream = clientOf(scripted(hanging), { timeoutMs: 20 }).encodeStream(["a"]);
  assert.ok((await failureOf(stream.next())) instanceof lib.DeadlineExceededError);
});

function encoded(array, shape, data_type) {
  return { shape, data_type, data: Buffer.from(array.buffer).toString("base64") };
}

test("arrays keep their type and their bits", () => {
  const values = [0, 1, 127];
  for (const [type, name] of [[Float32Array, "float32"], [Int32Array, "int32"], [Int8Array, "int8"], [Uint8Array, "uint8"]]) {
    const { data, shape } = lib.decodeTensor(encoded(type.from(values), [3, 1], name));
    assert.deepEqual([data, shape], [type.from(values), [3, 1]]);
  }
  const half = Uint16Array.of(0x0000, 0x8000, 0x3c00, 0xbc01, 0x0001, 0x7bff, 0x7c00, 0xfc00, 0x7e00);
  const expected = Float32Array.of(0, -0, 1, -(1 + 2 ** -10), 2 ** -24, 65504, Infinity, -Infinity, NaN);
  assert.deepEqual(lib.decodeTensor(encoded(half, [9], "float16")).data, expected);
});

test("arrays are converted on a big-endian host", () => {
  const swapped = Uint8Array.of(0x3f, 0x80, 0, 0, 0xc0, 0, 0, 0); // 1 and -2 as this host would not write them
  const { data } = lib.decodeTensor(encoded(swapped, [2], "float32"), false);
  assert.deepEqual(data, Float32Array.of(1, -2));
});

test("invalid arrays are errors", () => {
  const values = Float32Array.of(1, 2);
  for (const invalid of [
    encoded(values, [3], "float32"),
    encoded(values, [2], "int8"),
    encoded(values, [2], "float64"),
    encoded(values, [2], "toString"),
    { ...encoded(values, [2], "float32"), data: "%" },
  ]) {
    assert.throws(() => lib.decodeTensor(invalid), lib.BadResponseError);
  }
});

test("parts of a tensor share its memory", () => {
  const tensor = lib.decodeTensor(encoded(Float32Array.of(0, 1, 2, 3, 4, 5, 6, 7), [2, 2, 2], "float32"));
  assert.deepEqual(tensor.at(1, 0), new lib.Tensor([2], Float32Array.of(4, 5)));
  assert.deepEqual(tensor.at(-1, -1, 0), new lib.Tensor([], Float32Array.of(6)));
  assert.equal(tensor.at(1).data.buffer, tensor.data.buffer);
  assert.deepEqual(tensor.rows, [Float32Array.of(0, 1, 2, 3), Float32Array.of(4, 5, 6, 7)]);
  assert.equal(JSON.stringify(tensor), "[[[0,1],[2,3]],[[4,5],[6,7]]]");
  assert.equal(JSON.stringify(tensor.at(0, 0, 1)), "1");
  for (const indices of [[2], [-3], [0.5], [0, 0, 0, 0]]) assert.throws(() => tensor.at(...indices), RangeError);
});

test("a tensor is iterated along its first axis", () => {
  const tensor = new lib.Tensor([2, 2], Float32Array.of(1, 2, 3, 4));
  assert.deepEqual([...tensor], [new lib.Tensor([2], Float32Array.of(1, 2)), new lib.Tensor([2], Float32Array.of(3, 4))]);
  assert.deepEqual([...tensor.at(1)], [3, 4]);
  assert.deepEqual([...new lib.Tensor([0, 2], new Float32Array())], []);
});

const float = (values, shape) => encoded(Float32Array.from(values), shape, "float32");
const USAGE = { num_tokens: 3 };
const TOKENS = [{ id: 1 }, { id: 2 }];
const ATTENTION = { layers: [0], heads: [0], unit_ids: [], dense: float([0, 1, 1, 0], [1, 1, 2, 2]) };
const EXPLAINED = { tokens: TOKENS, unit_ids: [], target_value: 0.5, scores: [{ values: float([NaN, 1], [2]) }] };
const RESULTS = { model: "m", usages: [USAGE, USAGE] };
const SCORED = [{ index: 1, score: 0.5, logit: 0 }, { index: 0, score: 0.1, logit: -2 }];
const VALID = {
  embed: { ...RESULTS, embeddings: float([1, 2], [2, 1]) },
  encode: { results: [{ tokens: TOKENS, last_hidden_state: float([1, 2, 3, 4], [2, 2]), attention: [ATTENTION] }, TEXT] },
  tokenize: { results: [{ tokens: TOKENS }, TEXT] },
  explain: { results: [EXPLAINED, EXPLAINED] },
  compare: { results: [{ a: EXPLAINED, b: EXPLAINED, similarity: 0.5, matrix: float([1, 2, 3, NaN], [2, 2]) }] },
  score: { ...RESULTS, results: SCORED },
  classify: { ...RESULTS, labels: ["x"], logits: float([1, 2], [2, 1]), scores: float([0.1, 0.2], [2, 1]) },
  models: { models: [{ name: "m" }] },
};
const ARGUMENTS = { embed: [["a", "b"]], compare: [{ a: "a", b: "b" }], score: ["q", ["a", "b"]], models: [] };

function call(method, response) {
  return clientOf(scripted(reply(response)))[method](...(ARGUMENTS[method] ?? ARGUMENTS.embed));
}

test("valid responses are accepted", async () => {
  for (const [method, response] of Object.entries(VALID)) await call(method, response);
});

test("responses that are no objects, or lack their results, are errors", async () => {
  for (const method of Object.keys(VALID)) {
    for (const response of [null, [], 3, "x", {}, { results: null }, { results: [null] }, { results: {} }, { embeddings: 1 }, { models: [1] }]) {
      const error = await failureOf(call(method, response));
      assert.ok(error instanceof lib.BadResponseError, `${method} ${JSON.stringify(response)}: ${error}`);
    }
  }
});

for (const [name, method, change] of [
  ["too few embeddings", "embed", { embeddings: float([1], [1, 1]) }],
  ["one axis", "embed", { embeddings: float([1, 2], [2]) }],
  ["NaN", "embed", { embeddings: float([1, NaN], [2, 1]) }],
  ["an infinity", "embed", { embeddings: float([1, -Infinity], [2, 1]) }],
  ["another type", "embed", { embeddings: encoded(Int8Array.of(1, 2), [2, 1], "int8") }],
  ["lists", "embed", { embeddings: [[1], [2]] }],
  ["too few usages", "embed", { usages: [USAGE] }],
  ["a usage without numbers", "embed", { usages: [USAGE, { num_tokens: "3" }] }],
  ["too few texts", "encode", { results: [TEXT] }],
  ["too many texts", "tokenize", { results: [TEXT, TEXT, TEXT] }],
  ["no tokens", "tokenize", { results: [TEXT, {}] }],
  ["other vectors than tokens", "encode", { results: [{ tokens: TOKENS, last_hidden_state: float([1], [1, 1]) }, TEXT] }],
  ["other weights than tokens", "encode", { results: [{ tokens: TOKENS, attention: [{ ...ATTENTION, dense: float([1], [1, 1, 1, 1]) }] }, TEXT] }],
  ["weights that are NaN", "encode", { results: [{ tokens: TOKENS, attention: [{ ...ATTENTION, dense: float([NaN, 1, 1, 0], [1, 1, 2, 2]) }] }, TEXT] }],
  ["no weights", "encode", { results: [{ tokens: TOKENS, attention: [{ ...ATTENTION, dense: undefined }] }, TEXT] }],
  ["other units than tokens", "explain", { results: [{ ...EXPLAINED, unit_ids: [0] }, EXPLAINED] }],
  ["other scores than tokens", "explain", { results: [{ ...EXPLAINED, scores: [{ values: float([1], [1]) }] }, EXPLAINED] }],
  ["infinite scores", "explain", { results: [{ ...EXPLAINED, scores: [{ values: float([1, Infinity], [2]) }] }, EXPLAINED] }],
  ["no target", "explain", { results: [{ ...EXPLAINED, target_value: null }, EXPLAINED] }],
  ["a matrix of another shape", "compare", { results: [{ a: EXPLAINED, b: EXPLAINED, similarity: 1, matrix: float([1], [1, 1]) }] }],
  ["no second text", "compare", { results: [{ a: EXPLAINED, similarity: 1 }] }],
  ["a document twice", "score", { results: [SCORED[0], SCORED[0]] }],
  ["an index out of range", "score", { results: [SCORED[0], { ...SCORED[1], index: 2 }] }],
  ["a score of null", "score", { results: [SCORED[0], { ...SCORED[1], score: null }] }],
  ["other logits than labels", "classify", { labels: ["x", "y"] }],
  ["labels that are no strings", "classify", { labels: [1] }],
  ["an invalid shape", "embed", { embeddings: { ...float([1, 2], [2, 1]), shape: [2, "1"] } }],
  ["a negative length", "embed", { embeddings: { ...float([1, 2], [2, 1]), shape: [-2, -1] } }],
  ["a shape that is no list", "embed", { embeddings: { ...float([1, 2], [2, 1]), shape: 2 } }],
  ["data that is no string", "embed", { embeddings: { ...float([1, 2], [2, 1]), data: {} } }],
  ["an element type that is no string", "embed", { embeddings: { ...float([1, 2], [2, 1]), data_type: {} } }],
]) {
  test(`a response of ${method} with ${name} is an error`, async () => {
    const error = await failureOf(call(method, { ...VALID[method], ...change }));
    assert.ok(error instanceof lib.BadResponseError, String(error));
  });
}

test("deeply nested responses and errors of other types are errors of the client", async () => {
  const nested = `{"results":${"[".repeat(100_000)}${"]".repeat(100_000)}}`;
  assert.ok((await failureOf(call("encode", JSON.parse('{"results": [[[]]]}')))) instanceof lib.BadResponseError);
  assert.ok((await failureOf(clientOf(scripted(reply(nested))).encode("a"))) instanceof lib.BadResponseError);
  const body = { error: "x", reason: 3, violations: [null, 1, { field: "f", description: "d" }], metadata: { a: 1, b: "c" } };
  const error = await failureOf(clientOf(scripted(reply(body, 400))).encode("a"));
  assert.deepEqual([error.constructor, error.reason, error.metadata], [lib.AttnlensError, "", { b: "c" }]);
  assert.deepEqual(error.violations, [{ field: "f", description: "d" }]);
});

for (const [name, count, ...parts] of [
  ["without parts", 1],
  ["without the last text", 2, first(0)],
  ["without a part of the last text", 1, first(0, 1)],
  ["without a part of another text", 2, first(0, 1), first(1)],
  ["with more parts than announced", 1, first(0), { input_index: 0, attention: ATTENTION }],
  ["with more texts than requested", 1, first(0), first(1)],
  ["with a text twice", 2, first(0), first(0)],
  ["with a part of another text", 1, first(0, 1), { input_index: 1, attention: ATTENTION }],
  ["with an empty part", 1, {}],
  ["with a part that is no object", 1, 3],
  ["with a number of parts that is none", 1, first(0, "1")],
  ["with attention of other tokens", 1, first(0, 1), { input_index: 0, attention: ATTENTION }],
]) {
  test(`a stream ${name} is an error`, async () => {
    const read = async () => {
      for await (const _ of clientOf(scripted(streamed(linesOf(...parts), 1000))).encodeStream(Array(count).fill("a")));
    };
    assert.ok((await failureOf(read())) instanceof lib.BadResponseError);
  });
}

test("the size of a response and of a line is limited, and the rest is not read", async () => {
  let numParts = 0;
  const endless = () => new Response(new ReadableStream({ pull: (controller) => (numParts++, controller.enqueue(new Uint8Array(1000).fill(32))) }));
  const client = clientOf(scripted(endless), { maxResponseBytes: 10_000 });
  const stream = client.encodeStream("a");
  for (const failing of [client.encode("a"), stream.next()]) {
    const error = await failureOf(failing);
    assert.ok(error instanceof lib.BadResponseError);
    assert.match(error.message, /more than 10000 bytes: use a larger maxResponseBytes/);
  }
  assert.ok(numParts < 40);
  const short = linesOf(...Array.from({ length: 200 }, (_, index) => first(index)));
  let count = 0;
  for await (const _ of clientOf(scripted(streamed(short, 100)), { maxResponseBytes: 1000 }).encodeStream(Array(200).fill("a"))) count++;
  assert.equal(count, 200);
});

/** Call a function with the URL of an HTTP server. */
async function served(handle, use) {
  const server = createServer(handle).listen(0, "127.0.0.1");
  await new Promise((resolve) => server.once("listening", resolve));
  try {
    return await use(`http://127.0.0.1:${server.address().port}`);
  } finally {
    await new Promise((resolve) => (server.close(resolve), server.closeAllConnections()));
  }
}

test("redirects are not followed, so that no other host receives the key", async () => {
  let isCalled = false;
  await served((_, response) => ((isCalled = true), response.end("{}")), (other) =>
    served((_, response) => response.writeHead(307, { Location: `${other}/x` }).end(), async (baseUrl) => {
      const error = await failureOf(new lib.AttnlensClient({ baseUrl, apiKey: "secret" }).encode("a"));
      assert.ok(error instanceof lib.BadResponseError);
      assert.match(error.message, /redirects to another URL/);
    }),
  );
  assert.equal(isCalled, false);
});

test("the reason of a failed connection is part of the message", async () => {
  const baseUrl = await served(() => undefined, async (url) => url); // not listening any more
  const error = await failureOf(new lib.AttnlensClient({ baseUrl, maxRetries: 0 }).encode("a"));
  assert.ok(error instanceof lib.ConnectionError);
  assert.match(error.message, /^no response from the server: check the URL, and that it is running \(.*ECONNREFUSED/);
});
