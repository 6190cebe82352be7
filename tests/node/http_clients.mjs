// Checks of clients of npm against a server: `node http_clients.mjs SERVER RESULTS`.
//
// SERVER is the file that tests/clients_http/test_npm_clients.py writes. RESULTS becomes a JSON file with the error of
// each check, or null if it passed.

import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { connect } from "node:net";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { InferenceClient, InferenceClientProviderApiError } from "@huggingface/inference";
import { OpenAIEmbeddings } from "@langchain/openai";
import { APICallError, RetryError, embed, embedMany } from "ai";
import OpenAI from "openai";

const server = JSON.parse(readFileSync(process.argv[2]));
const { model, texts, vectors } = server;
const dimensions = vectors.short[0].length;

/** Check that vectors equal those of gRPC, bit for bit. */
function check(found, name) {
  const bits = (rows) => rows.map((row) => Array.from(row, Math.fround));
  assert.deepEqual(bits(found), bits(vectors[name]));
}

async function waitForMetric(name, value) {
  const pattern = new RegExp(`^${name.replace(/[{}"]/g, "\\$&")} (\\S+)$`, "m");
  for (const deadline = Date.now() + 60_000; Date.now() < deadline; ) {
    const text = await (await fetch(`${server.url}/metrics`)).text();
    if (Number(pattern.exec(text)?.[1]) === value) return;
  }
  assert.fail(`${name} is not ${value}`);
}

/** Call a function while unfinished requests hold the share of memory of this address, so that the server rejects its requests. */
async function whileFull(call) {
  const { hostname, port, host } = new URL(server.url);
  // A client may hold two thirds of the memory.
  const size = Math.floor((server.max_call_memory_bytes * 2) / 3 / server.body_copies / server.holders);
  const holders = Array.from({ length: server.holders }, () => {
    const holder = connect(Number(port), hostname);
    holder.on("error", () => {});
    holder.write(`POST /v1/embeddings HTTP/1.1\r\nHost: ${host}\r\nContent-Length: ${size + 1}\r\n\r\n`);
    holder.write(Buffer.alloc(size));
    return holder;
  });
  const release = async () => {
    for (const holder of holders) holder.destroy();
    await waitForMetric("attnlens_reserved_memory_bytes", 0);
  };
  try {
    await waitForMetric("attnlens_reserved_memory_bytes", server.body_copies * size * server.holders);
    return await call(release);
  } finally {
    await release();
  }
}

/** Return the statuses of responses, and a `fetch` that appends to them. */
function counting(onResponse = () => {}) {
  const statuses = [];
  const counted = async (...request) => {
    const response = await fetch(...request);
    statuses.push(response.status);
    await onResponse();
    return response;
  };
  return { statuses, fetch: counted };
}

async function error(call, kind) {
  try {
    await call();
  } catch (found) {
    assert.equal(found.constructor, kind, String(found));
    return found;
  }
  assert.fail(`no ${kind.name} was thrown`);
}

function openai(options = {}) {
  return new OpenAI({ baseURL: `${server.url}/v1`, apiKey: "-", ...options });
}

function rows(result) {
  return result.data.map((item) => item.embedding);
}

function langchain(options = {}) {
  return new OpenAIEmbeddings({
    model,
    apiKey: "-",
    configuration: { baseURL: `${server.url}/v1` },
    maxRetries: 0,
    ...options,
  });
}

function aiModel(name = model, options = {}) {
  return createOpenAICompatible({ name: "attnlens", baseURL: `${server.url}/v1`, ...options }).textEmbeddingModel(name);
}

const checks = {
  async openai_default_format_has_the_vectors_of_grpc() {
    const result = await openai().embeddings.create({ model, input: texts });
    check(rows(result), "texts");
    assert.equal(result.model, model);
    assert.ok(result.usage.prompt_tokens > 0);
  },
  async openai_float_format_has_the_vectors_of_grpc() {
    check(rows(await openai().embeddings.create({ model, input: texts, encoding_format: "float" })), "texts");
  },
  async openai_dimensions() {
    check(rows(await openai().embeddings.create({ model, input: texts, dimensions })), "short");
  },
  async openai_lists_the_model() {
    const { data } = await openai().models.list();
    assert.deepEqual(data.map((found) => found.id), [model]);
    assert.equal((await openai().models.retrieve(model)).id, model);
  },
  async openai_errors_have_their_classes() {
    const create = (body) => openai().embeddings.create({ model, input: texts, ...body });
    const unknown = await error(() => create({ model: "other" }), OpenAI.NotFoundError);
    assert.match(unknown.message, /other.*MiniLM/);
    const long = await error(() => create({ input: server.long }), OpenAI.BadRequestError);
    assert.equal(long.code, "context_length_exceeded");
    assert.match(long.message, /402.*256/);
    const ids = await error(() => create({ input: [[101, 102]] }), OpenAI.BadRequestError);
    assert.match(ids.message, /--http-token-ids/);
  },
  async openai_overload_is_a_rate_limit_error_after_three_requests() {
    const { statuses, fetch } = counting();
    await whileFull(() => error(() => openai({ fetch }).embeddings.create({ model, input: texts }), OpenAI.RateLimitError));
    assert.deepEqual(statuses, [429, 429, 429]);
  },
  async openai_retry_succeeds_after_an_overload() {
    await whileFull(async (release) => {
      const { statuses, fetch } = counting(release);
      check(rows(await openai({ fetch }).embeddings.create({ model, input: texts })), "texts");
      assert.deepEqual(statuses, [429, 200]);
    });
  },
  async openai_server_drops_the_work_of_aborted_calls() {
    const create = (options) =>
      openai({ maxRetries: 0 }).embeddings.create({ model, input: server.slow, truncate: true }, options);
    await error(() => create({ timeout: 200 }), OpenAI.APIConnectionTimeoutError);
    await waitForMetric('attnlens_queue_inputs{graph="embeddings"}', 0);
    const controller = new AbortController();
    const aborted = error(() => create({ signal: controller.signal }), OpenAI.APIUserAbortError);
    await waitForMetric('attnlens_queue_inputs{graph="embeddings"}', server.slow.length);
    controller.abort();
    await aborted;
    await waitForMetric('attnlens_queue_inputs{graph="embeddings"}', 0);
    await waitForMetric("attnlens_reserved_memory_bytes", 0);
  },
  async huggingface_feature_extraction_has_the_vectors_of_grpc() {
    const endpoint = new InferenceClient("-").endpoint(server.url);
    check(await endpoint.featureExtraction({ inputs: texts }), "texts");
    check(await endpoint.featureExtraction({ inputs: texts, normalize: false }), "raw");
    check(await endpoint.featureExtraction({ inputs: texts, dimensions }), "short");
    check(await endpoint.featureExtraction({ inputs: server.long, truncate: true }), "long");
  },
  async huggingface_text_classification_has_the_probabilities_of_grpc() {
    const endpoint = new InferenceClient("-").endpoint(server.classifier_url);
    const found = await endpoint.textClassification({ inputs: server.rerank_query, parameters: {} });
    assert.deepEqual(found.map(({ label, score }) => [label, score]), server.labels);
  },
  async huggingface_errors_have_the_status_and_message() {
    const endpoint = new InferenceClient("-").endpoint(server.url);
    const long = () => endpoint.featureExtraction({ inputs: server.long, truncate: false });
    const found = await error(long, InferenceClientProviderApiError);
    assert.equal(found.httpResponse.status, 422);
    assert.match(JSON.stringify(found.httpResponse.body), /402.*256/);
    const busy = () => endpoint.featureExtraction({ inputs: texts });
    const overload = await whileFull(() => error(busy, InferenceClientProviderApiError));
    assert.equal(overload.httpResponse.status, 429);
  },
  async langchain_has_the_vectors_of_grpc() {
    check(await langchain({ batchSize: 16 }).embedDocuments(server.some), "some");
    check([await langchain().embedQuery(server.query)], "query");
  },
  async langchain_errors_are_those_of_openai() {
    const unknown = () => langchain({ model: "other" }).embedQuery(server.query);
    assert.match((await error(unknown, OpenAI.NotFoundError)).message, /other.*MiniLM/);
    const busy = () => langchain().embedQuery(server.query);
    await whileFull(() => error(busy, OpenAI.RateLimitError));
  },
  async ai_sdk_has_the_vectors_of_grpc() {
    const { embeddings, usage } = await embedMany({ model: aiModel(), values: texts });
    check(embeddings, "texts");
    assert.ok(usage.tokens > 0);
    check([(await embed({ model: aiModel(), value: server.query })).embedding], "query");
  },
  async ai_sdk_errors_have_the_status_and_message() {
    const unknown = await error(() => embed({ model: aiModel("other"), value: "a" }), APICallError);
    assert.equal(unknown.statusCode, 404);
    assert.match(unknown.message, /other.*MiniLM/);
  },
  async ai_sdk_overload_is_a_retry_error_after_three_requests() {
    const { statuses, fetch } = counting();
    const busy = () => embed({ model: aiModel(model, { fetch }), value: server.query });
    const { lastError } = await whileFull(() => error(busy, RetryError));
    assert.equal(lastError.statusCode, 429);
    assert.deepEqual(statuses, [429, 429, 429]);
  },
};

const results = {};
for (const [name, run] of Object.entries(checks)) {
  const started = Date.now();
  try {
    await run();
    results[name] = null;
  } catch (failure) {
    results[name] = failure.stack.slice(0, 4000);
  }
  console.error(`${name}: ${(Date.now() - started) / 1000} s`);
}
writeFileSync(process.argv[3], JSON.stringify(results));
