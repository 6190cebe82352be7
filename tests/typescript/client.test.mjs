// Behavior of the client that needs no server: `node --test client.test.mjs`.
import assert from "node:assert/strict";
import { test } from "node:test";
import * as lib from "../../client/typescript/lib/index.js";

const OVERLOADED = { error: "full: try again", reason: "OVERLOADED" };
const OK = { results: [] };

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
  const script = scripted(reply(OK));
  const client = clientOf(script, { apiKey: "k", headers: { "X-Request-Id": "a" } });
  const direction = Float32Array.of(0.1, -2);
  await client.explain("It rained.", { direction, truncate: true });
  const { url, method, headers, body } = script.requests[0];
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
  const [first, second] = script.requests;
  assert.ok(second.at - first.at >= 50 + 100 - 5); // half of the first backoff; timers may be early
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
  assert.equal(error.message, "no response within 20 ms: use a larger timeoutMs");
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
  const lines = [{ input_index: 0, model: "Füße 東京 😀" }, { input_index: 1 }, { input_index: 2 }];
  const text = lines.map((line) => `${JSON.stringify(line)}\n`).join("");
  for (const size of [1, 2, 3, 7, 1000]) {
    const parts = [];
    for await (const part of clientOf(scripted(streamed(text, size))).encodeStream("a")) parts.push(part);
    assert.deepEqual(parts, lines);
  }
});

test("an error within a stream is thrown after the parts before it", async () => {
  const text = `{"input_index": 0}\n${JSON.stringify({ error: "gone", reason: "INTERNAL", metadata: { error_id: "x" } })}\n`;
  const script = scripted(streamed(text, 5));
  const stream = clientOf(script).encodeStream(["a"]);
  assert.deepEqual((await stream.next()).value, { input_index: 0 });
  const error = await failureOf(stream.next());
  assert.ok(error instanceof lib.InternalError);
  assert.deepEqual([error.status, error.metadata.error_id, script.requests.length], [200, "x", 1]);
});

test("a stream that ends within a line is an error", async () => {
  const stream = clientOf(scripted(streamed('{"input_index": 0}\n{"input', 100))).encodeStream(["a"]);
  await stream.next();
  assert.ok((await failureOf(stream.next())) instanceof lib.BadResponseError);
});

test("leaving the loop aborts the request", async () => {
  let isCancelled = false;
  const script = scripted(streamed('{"input_index": 0}\n'.repeat(9), 19, () => (isCancelled = true)));
  for await (const part of clientOf(script).encodeStream(["a"])) {
    assert.equal(part.input_index, 0);
    assert.equal(script.requests[0].signal.aborted, false);
    break;
  }
  assert.equal(script.requests[0].signal.aborted, true);
  assert.equal(isCancelled, true);
});

test("the time limit of a stream applies to each wait, not to the caller", async () => {
  const script = scripted(streamed('{"input_index": 0}\n'.repeat(3), 19));
  let count = 0;
  for await (const _ of clientOf(script, { timeoutMs: 200 }).encodeStream(["a"])) {
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
