// src/errors.ts
var RETRYABLE_STATUSES = [429, 502, 503, 504];
var AttnlensError = class extends Error {
  constructor(message, body = {}, { status = 0, headers, cause } = {}) {
    super(message, cause === void 0 ? void 0 : { cause });
    this.body = body;
    this.status = status;
    this.reason = body.reason ?? "";
    this.violations = body.violations ?? [];
    this.metadata = body.metadata ?? {};
    this.requestId = headers?.get("x-request-id") ?? "";
    this.retryAfterMs = headers ? retryAfterMs(headers) : null;
    const advice = headers?.get("x-should-retry");
    this.retryable = advice ? advice === "true" : this.retryAfterMs !== null || RETRYABLE_STATUSES.includes(status);
  }
  body;
  name = "AttnlensError";
  /** HTTP status. 200 if a stream failed after it had started, 0 if there was no response. */
  status;
  /** Name of a reason, such as `INPUT_TOO_LONG`. Empty if the error does not come from an attnlens server. */
  reason;
  /** Invalid fields. */
  violations;
  /** Values by name, such as `num_tokens` and `max_tokens` of `InputTooLongError`. */
  metadata;
  /** Identifier of the request in the server's log. Empty if there was no response. */
  requestId;
  /** Retry delay from the server in milliseconds, or null. */
  retryAfterMs;
  /** Whether the same request may succeed later. */
  retryable;
};
var InvalidFieldError = class extends AttnlensError {
  name = "InvalidFieldError";
};
var InputTooLongError = class extends AttnlensError {
  name = "InputTooLongError";
};
var ResponseTooLargeError = class extends AttnlensError {
  name = "ResponseTooLargeError";
};
var RequestTooLargeError = class extends AttnlensError {
  name = "RequestTooLargeError";
};
var RequestTooExpensiveError = class extends AttnlensError {
  name = "RequestTooExpensiveError";
};
var MalformedRequestError = class extends AttnlensError {
  name = "MalformedRequestError";
};
var ModelNotFoundError = class extends AttnlensError {
  name = "ModelNotFoundError";
};
var NotSupportedError = class extends AttnlensError {
  name = "NotSupportedError";
};
var UnauthenticatedError = class extends AttnlensError {
  name = "UnauthenticatedError";
};
var PermissionDeniedError = class extends AttnlensError {
  name = "PermissionDeniedError";
};
var OverloadedError = class extends AttnlensError {
  name = "OverloadedError";
};
var RateLimitedError = class extends AttnlensError {
  name = "RateLimitedError";
};
var NotReadyError = class extends AttnlensError {
  name = "NotReadyError";
};
var ShuttingDownError = class extends AttnlensError {
  name = "ShuttingDownError";
};
var DeadlineExceededError = class extends AttnlensError {
  name = "DeadlineExceededError";
};
var SlowConsumerError = class extends AttnlensError {
  name = "SlowConsumerError";
};
var GraphUnavailableError = class extends AttnlensError {
  name = "GraphUnavailableError";
};
var InternalError = class extends AttnlensError {
  name = "InternalError";
};
var ConnectionError = class extends AttnlensError {
  name = "ConnectionError";
  retryable = true;
};
var BadResponseError = class extends AttnlensError {
  name = "BadResponseError";
};
var ERROR_CLASSES = {
  INVALID_FIELD: InvalidFieldError,
  INPUT_TOO_LONG: InputTooLongError,
  RESPONSE_TOO_LARGE: ResponseTooLargeError,
  REQUEST_TOO_LARGE: RequestTooLargeError,
  REQUEST_TOO_EXPENSIVE: RequestTooExpensiveError,
  MALFORMED_REQUEST: MalformedRequestError,
  MODEL_NOT_FOUND: ModelNotFoundError,
  NOT_SUPPORTED: NotSupportedError,
  UNAUTHENTICATED: UnauthenticatedError,
  PERMISSION_DENIED: PermissionDeniedError,
  OVERLOADED: OverloadedError,
  RATE_LIMITED: RateLimitedError,
  NOT_READY: NotReadyError,
  SHUTTING_DOWN: ShuttingDownError,
  DEADLINE_EXCEEDED: DeadlineExceededError,
  SLOW_CONSUMER: SlowConsumerError,
  GRAPH_UNAVAILABLE: GraphUnavailableError,
  INTERNAL: InternalError
};
function errorFrom(body, source) {
  const isOwn = typeof body === "object" && body !== null && "error" in body && typeof body.error === "string";
  const known = isOwn ? { ...body, ...ownFields(body) } : {};
  const reason = known.reason ?? "";
  const errorClass = Object.hasOwn(ERROR_CLASSES, reason) ? ERROR_CLASSES[reason] : AttnlensError;
  return new errorClass(known.error ?? `the server responded with status ${source.status}`, known, source);
}
function ownFields({ error, reason, violations, metadata }) {
  const isText = (value) => typeof value === "string";
  return {
    error: isText(error) ? error : void 0,
    reason: isText(reason) ? reason : void 0,
    violations: Array.isArray(violations) ? violations.filter((violation) => isText(violation?.field) && isText(violation?.description)) : [],
    metadata: Object.fromEntries(Object.entries(metadata ?? {}).filter(([, value]) => isText(value)))
  };
}
function retryAfterMs(headers) {
  const [ms, value] = [headers.get("retry-after-ms"), headers.get("retry-after")];
  if (ms === null && value === null) return null;
  const seconds = Number(value);
  const delay = ms !== null ? Number(ms) : Number.isNaN(seconds) ? Date.parse(value ?? "") - Date.now() : 1e3 * seconds;
  return Number.isNaN(delay) ? null : Math.max(0, delay);
}

// src/tensor.ts
var ARRAY_TYPES = { float32: Float32Array, float16: Uint16Array, int32: Int32Array, int8: Int8Array, uint8: Uint8Array };
var MAX_DEPTH = 50;
var HOST_IS_LITTLE_ENDIAN = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;
var Tensor = class _Tensor {
  constructor(shape, data) {
    this.shape = shape;
    this.data = data;
  }
  shape;
  data;
  /**
   * Return the part with the given indices of the first axes. It shares the memory of this tensor.
   * Negative indices count from the end. A RangeError is thrown for an index that is out of range.
   */
  at(...indices) {
    let { shape, data } = this;
    for (const index of indices) {
      const [length, ...rest] = shape;
      const position = index < 0 ? index + length : index;
      if (!(Number.isInteger(position) && position >= 0 && position < length)) {
        throw new RangeError(`index ${index} is out of range: shape [${this.shape}] has ${length ?? "no such axis"}`);
      }
      const size = product(rest);
      shape = rest;
      data = data.subarray(position * size, (position + 1) * size);
    }
    return new _Tensor(shape, data);
  }
  /** Rows of a matrix, or the parts along the first axis as flat arrays. They share the memory of this tensor. */
  get rows() {
    return Array.from({ length: this.shape[0] ?? 0 }, (_, index) => this.at(index).data);
  }
  /** Iterate over the numbers of a vector, or the parts of another array along its first axis. */
  *[Symbol.iterator]() {
    if (this.shape.length < 2) yield* this.data;
    else for (let index = 0; index < this.shape[0]; index++) yield this.at(index);
  }
  /** Return nested lists, which requests accept. */
  toJSON() {
    if (this.shape.length === 0) return this.data[0];
    if (this.shape.length === 1) return Array.from(this.data);
    return Array.from({ length: this.shape[0] }, (_, index) => this.at(index).toJSON());
  }
};
function decodeTensors(value, depth = 0) {
  if (typeof value !== "object" || value === null) return value;
  if (isEncoded(value)) return decodeTensor(value);
  if (depth === MAX_DEPTH) throw new BadResponseError(`the response has more than ${MAX_DEPTH} levels`);
  const fields = value;
  for (const key of Object.keys(fields)) {
    if (typeof fields[key] === "object") fields[key] = decodeTensors(fields[key], depth + 1);
  }
  return value;
}
function isEncoded(value) {
  return "data" in value && "data_type" in value && "shape" in value;
}
function decodeTensor({ shape, data_type: name, data }, hostIsLittleEndian = HOST_IS_LITTLE_ENDIAN) {
  if (!Array.isArray(shape) || !shape.every((length) => Number.isSafeInteger(length) && length >= 0) || typeof data !== "string") {
    throw new BadResponseError("a tensor has no valid shape or data");
  }
  if (typeof name !== "string" || !Object.hasOwn(ARRAY_TYPES, name)) {
    throw new BadResponseError(`unknown element type ${JSON.stringify(name)}: use a newer client`);
  }
  const ArrayType = ARRAY_TYPES[name];
  const bytes = fromBase64(data);
  const size = ArrayType.BYTES_PER_ELEMENT;
  if (bytes.length !== product(shape) * size) {
    throw new BadResponseError(`a tensor of shape [${shape}] has ${bytes.length} bytes, which do not match its type ${name}`);
  }
  if (!hostIsLittleEndian) {
    for (let start = 0; start < bytes.length; start += size) bytes.subarray(start, start + size).reverse();
  }
  const array = new ArrayType(bytes.buffer);
  return new Tensor(shape, array instanceof Uint16Array ? Float32Array.from(array, fromHalf) : array);
}
function fromBase64(text) {
  const native = Uint8Array;
  try {
    return native.fromBase64?.(text) ?? Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  } catch (cause) {
    throw new BadResponseError("a tensor is not valid base64", {}, { cause });
  }
}
function fromHalf(bits) {
  const sign = bits & 32768 ? -1 : 1;
  const [exponent, fraction] = [bits >> 10 & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}
function product(lengths) {
  return lengths.reduce((size, length) => size * length, 1);
}

// src/checks.ts
var MAX_SHOWN = 200;
function check(condition, problem) {
  if (!condition) throw new BadResponseError(`invalid response: ${problem}`);
}
function shown(value) {
  return `${value instanceof Tensor ? `a tensor of shape [${value.shape}]` : JSON.stringify(value)}`.slice(0, MAX_SHOWN);
}
function checkObject(value, name = "the response") {
  const isObject = typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Tensor);
  check(isObject, `${name} is ${shown(value)}, expected an object`);
}
function checkedObjects(value, name, count) {
  check(Array.isArray(value), `${name} is ${shown(value)}, expected a list`);
  check(count === void 0 || value.length === count, `there are ${value.length} ${name}, expected ${count}`);
  value.forEach((item, index) => checkObject(item, `${name}[${index}]`));
  return value;
}
function checkedTensor(value, name, shape, { type, gaps = false } = {}) {
  check(value instanceof Tensor, `${name} is ${shown(value)}, expected a tensor`);
  const matches = value.shape.length === shape.length && shape.every((length, axis) => length === null || length === value.shape[axis]);
  check(matches, `${name} has shape [${value.shape}], expected [${shape.map((length) => length ?? "any")}]`);
  check(type === void 0 || value.data.constructor === type, `${name} has elements of ${value.data.constructor.name}, expected ${type?.name}`);
  checkFinite(value, name, gaps);
  return value;
}
function checkFinite({ data }, name, gaps) {
  if (!(data instanceof Float32Array)) return;
  const isInvalid = gaps ? (number) => Math.abs(number) === Infinity : (number) => !Number.isFinite(number);
  check(!data.some(isInvalid), `${name} has a number that is not finite`);
}
function checkedNumber(value, name) {
  check(Number.isFinite(value), `${name} is ${shown(value)}, expected a number`);
  return value;
}
function checkedIndex(value, name, limit = Infinity) {
  check(Number.isInteger(value) && value >= 0 && value < limit, `${name} is ${shown(value)}, which is out of range`);
  return value;
}
function checkUsages(response, count) {
  check(typeof response.model === "string", "the response has no model");
  for (const usage of checkedObjects(response.usages, "usages", count)) checkedIndex(usage.num_tokens, "num_tokens");
}
function checkEmbeddings(response, count, type) {
  const { rows } = checkedTensor(response.embeddings, "embeddings", [count, null], { type });
  checkUsages(response, count);
  return rows;
}
function checkEncodedText(text) {
  const { length } = checkedObjects(text.tokens, "tokens");
  if (text.last_hidden_state !== void 0) checkedTensor(text.last_hidden_state, "last_hidden_state", [length, null]);
  for (const result of checkedObjects(text.attention ?? [], "attention")) checkAttention(result, length);
}
function checkAttention(result, numTokens) {
  for (const name of ["layers", "heads"]) {
    const list = result[name];
    check(Array.isArray(list) && list.every(Number.isInteger), `${name} is ${shown(list)}, expected a list of integers`);
  }
  const units = checkUnits(result.unit_ids, numTokens);
  const forms = {
    dense: [null, null, null, units],
    sqrt_uint8: [null, null, null, units],
    per_token: [null, numTokens, null],
    band: [null, null, numTokens, null],
    blocks: [null, null, numTokens, null]
  };
  for (const [name, shape] of Object.entries(forms)) {
    if (result[name] !== void 0) checkedTensor(result[name], name, shape);
  }
  const groups = ["top_k", "sparse", "statistics"].filter((name) => result[name] !== void 0);
  for (const group of groups) {
    checkObject(result[group], group);
    for (const [name, value] of Object.entries(result[group])) {
      check(value instanceof Tensor, `${group}.${name} is ${shown(value)}, expected a tensor`);
      checkFinite(value, `${group}.${name}`, false);
    }
  }
  const count = groups.length + Object.keys(forms).filter((name) => result[name] !== void 0).length;
  check(count === 1, `an attention result has ${count} forms, expected 1`);
}
function checkUnits(ids, numTokens) {
  if (ids === void 0 || Array.isArray(ids) && ids.length === 0) return numTokens;
  const isValid = Array.isArray(ids) && ids.every(Number.isInteger) && (numTokens ?? ids.length) === ids.length;
  check(isValid, `unit_ids is ${shown(ids)}, expected one integer for each of ${numTokens} tokens`);
  return ids.reduce((last, id) => Math.max(last, id), -1) + 1;
}
function checkExplanation(value) {
  checkObject(value, "an explanation");
  const { length } = checkedObjects(value.tokens, "tokens");
  const units = checkUnits(value.unit_ids, length);
  checkedNumber(value.target_value, "target_value");
  for (const scores of checkedObjects(value.scores, "scores")) checkedTensor(scores.values, "values", [units], { gaps: true });
  if (value.head_contributions !== void 0) checkedTensor(value.head_contributions, "head_contributions", [null, null]);
  return units;
}
function checkComparison(result) {
  const shape = [checkExplanation(result.a), checkExplanation(result.b)];
  checkedNumber(result.similarity, "similarity");
  if (result.matrix !== void 0) checkedTensor(result.matrix, "matrix", shape, { gaps: true });
}
function checkScores(response, count, numResults) {
  const indices = /* @__PURE__ */ new Set();
  for (const result of checkedObjects(response.results, "results", numResults)) {
    indices.add(checkedIndex(result.index, "index", count));
    checkedNumber(result.score, "score");
    checkedNumber(result.logit, "logit");
    if (result.explanation !== void 0) checkExplanation(result.explanation);
  }
  check(indices.size === numResults, "results have an index twice");
  checkUsages(response, count);
}
function checkClasses(response, count) {
  const { labels } = response;
  check(Array.isArray(labels) && labels.every((label) => typeof label === "string"), `labels is ${shown(labels)}, expected a list of strings`);
  for (const name of ["logits", "scores"]) checkedTensor(response[name], name, [count, labels.length]);
  checkUsages(response, count);
}
var StreamCheck = class {
  // parts of the current text
  constructor(count) {
    this.count = count;
  }
  count;
  index = -1;
  // of the current text
  numTokens = 0;
  left = 0;
  part(value) {
    checkObject(value, "a part");
    const { input_index, text, attention } = value;
    if (text !== void 0) {
      this.checkEnd();
      this.index = checkedIndex(++this.index, "input_index", this.count);
      this.left = checkedIndex(value.num_attention_parts, "num_attention_parts");
      checkObject(text, "text");
      checkEncodedText(text);
      this.numTokens = text.tokens.length;
    } else {
      checkObject(attention, "attention");
      check(this.left-- > 0, `text ${this.index} has more parts than announced`);
      checkAttention(attention, this.numTokens);
    }
    check(input_index === this.index, `input_index is ${shown(input_index)}, expected ${this.index}`);
  }
  end() {
    this.checkEnd();
    check(this.index === this.count - 1, `the stream has ${this.index + 1} texts, expected ${this.count}`);
  }
  checkEnd() {
    check(this.left === 0, `${this.left} parts of text ${this.index} are missing`);
  }
};

// src/transport.ts
var FIRST_DELAY_MS = 200;
var MAX_DELAY_MS = 5e3;
var MAX_ERROR_BYTES = 1 << 20;
var MAX_TIMER_MS = 2 ** 31 - 1;
var Transport = class {
  constructor(baseUrl, options = {}) {
    this.options = options;
    this.base = baseUrl.replace(/\/+$/, "");
    this.timeoutMs = Math.min(options.timeoutMs ?? 6e4, MAX_TIMER_MS);
    this.maxRetries = options.maxRetries ?? 3;
    this.maxBytes = options.maxResponseBytes ?? 256 << 20;
    const { apiKey } = options;
    this.headers = { "Content-Type": "application/json", ...apiKey && { Authorization: `Bearer ${apiKey}` }, ...options.headers };
  }
  options;
  base;
  headers;
  timeoutMs;
  maxRetries;
  maxBytes;
  /** Return the JSON value of a response. Without a body, the request is a GET request. */
  async request(path, body, signal) {
    const call = new Call(this.timeoutMs, signal);
    try {
      return await this.send(call, path, body, async (response) => parse(await textOf(response, this.maxBytes), response));
    } finally {
      call.end();
    }
  }
  /** Yield the JSON value of each line of a response. Leaving the loop cancels the request. */
  async *lines(path, body, signal) {
    const call = new Call(this.timeoutMs, signal);
    try {
      const response = await this.send(call, path, body, async (response2) => response2);
      for await (const line of linesOf(response, call, this.maxBytes)) {
        const value = parse(line, response);
        if (typeof value === "object" && value !== null && "error" in value) {
          throw errorFrom(value, { status: response.status, headers: response.headers });
        }
        yield value;
      }
    } finally {
      call.end();
    }
  }
  async send(call, path, body, read) {
    const url = this.base ? `${this.base}/${path}` : path;
    const content = body === void 0 ? void 0 : JSON.stringify(body, (_, value) => ArrayBuffer.isView(value) ? listOf(value) : value);
    const method = content === void 0 ? "GET" : "POST";
    const init = { method, headers: this.headers, body: content, redirect: "error" };
    for (let attempt = 0; ; attempt++) {
      try {
        return await call.run(async (signal) => {
          const response = await (this.options.fetch ?? fetch)(url, { ...init, signal });
          if (!response.ok) throw await failureOf(response);
          return await read(response);
        });
      } catch (error) {
        if (!(error instanceof AttnlensError && error.retryable) || attempt >= this.maxRetries) throw error;
        const backoffMs = Math.min(FIRST_DELAY_MS * 2 ** attempt, MAX_DELAY_MS);
        await call.wait((error.retryAfterMs ?? 0) + backoffMs * (0.5 + Math.random() / 2), error);
      }
    }
  }
};
var Call = class {
  constructor(timeoutMs, signal) {
    this.timeoutMs = timeoutMs;
    this.signal = signal;
    this.abort = () => this.controller.abort(signal?.reason);
    if (signal?.aborted) this.abort();
    else signal?.addEventListener("abort", this.abort);
    this.restart();
  }
  timeoutMs;
  signal;
  controller = new AbortController();
  abort;
  timer;
  endsAt = 0;
  /** Start the time limit again. */
  restart() {
    this.stop();
    this.endsAt = performance.now() + this.timeoutMs;
    const message = `no response within ${this.timeoutMs} ms: check that the server is reachable, or use a larger timeoutMs`;
    this.timer = setTimeout(() => this.controller.abort(new DeadlineExceededError(message)), this.timeoutMs);
  }
  /** Stop the time limit. */
  stop() {
    clearTimeout(this.timer);
  }
  /** Return the result of a function. If the call was aborted, reject with the reason. */
  async run(action) {
    const { signal } = this.controller;
    signal.throwIfAborted();
    let abort = () => void 0;
    const aborted = new Promise((_, reject) => {
      abort = () => reject(signal.reason);
      signal.addEventListener("abort", abort);
    });
    try {
      return await Promise.race([action(signal), aborted]);
    } catch (cause) {
      signal.throwIfAborted();
      if (cause instanceof AttnlensError) throw cause;
      throw connectionError(cause);
    } finally {
      signal.removeEventListener("abort", abort);
    }
  }
  /** Wait before a retry. Throw `error` if there is no time for it. */
  async wait(delayMs, error) {
    if (performance.now() + delayMs >= this.endsAt) throw error;
    const { signal } = this.controller;
    await new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, delayMs);
      signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
    });
  }
  /** Release the time limit, and cancel a response that was not read completely. */
  end() {
    this.stop();
    this.signal?.removeEventListener("abort", this.abort);
    this.controller.abort();
  }
};
function connectionError(cause) {
  const reason = [cause?.cause, cause].map((error) => error?.message).find(Boolean);
  const details = reason ? ` (${reason})` : "";
  if (/redirect/.test(details)) return new BadResponseError(`the server redirects to another URL: use that URL${details}`, {}, { cause });
  return new ConnectionError(`no response from the server: check the URL, and that it is running${details}`, {}, { cause });
}
function tooLarge(maxBytes) {
  return new BadResponseError(`the response, or a line of it, has more than ${maxBytes} bytes: use a larger maxResponseBytes`);
}
async function textOf(response, maxBytes) {
  const reader = response.body?.getReader();
  const decoder = new TextDecoder();
  let [text, size] = ["", 0];
  for (; ; ) {
    const { done, value } = await reader?.read() ?? { done: true, value: void 0 };
    if (done) return text + decoder.decode();
    size += value.length;
    if (size > maxBytes) {
      reader?.cancel().catch(() => void 0);
      throw tooLarge(maxBytes);
    }
    text += decoder.decode(value, { stream: true });
  }
}
async function* linesOf(response, call, maxBytes) {
  const reader = response.body?.getReader();
  if (!reader) throw new BadResponseError("the response is empty: check the URL");
  const decoder = new TextDecoder();
  let parts = [];
  let size = 0;
  try {
    for (; ; ) {
      call.restart();
      const { done, value } = await call.run(() => reader.read());
      call.stop();
      if (done) break;
      size += value.length;
      if (size > maxBytes) throw tooLarge(maxBytes);
      const [first, ...lines] = decoder.decode(value, { stream: true }).split("\n");
      parts.push(first);
      for (const line of lines) {
        yield parts.join("");
        parts = [line];
        size = value.length;
      }
    }
  } finally {
    reader.cancel().catch(() => void 0);
  }
  if (parts.join("") !== "") throw new BadResponseError("the stream ended within a line");
}
async function failureOf(response) {
  const text = await textOf(response, MAX_ERROR_BYTES).catch(() => "");
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    body = null;
  }
  return errorFrom(body, response);
}
function parse(text, { status, headers }) {
  try {
    return JSON.parse(text);
  } catch (cause) {
    throw new BadResponseError("the response is not valid JSON: check the URL", {}, { status, headers, cause });
  }
}
function listOf(array) {
  return Array.from(array);
}

// src/client.ts
var AttnlensClient = class {
  transport;
  constructor({ baseUrl, ...options }) {
    this.transport = new Transport(`${baseUrl.replace(/\/+$/, "")}/v1/attnlens`, options);
  }
  async embed(inputs, options) {
    const texts = listOf2(inputs);
    const response = await this.call("embed", { inputs: texts }, options);
    const embeddings = checkEmbeddings(response, texts.length, EMBEDDING_ARRAYS[options?.embedding_type ?? "float"]);
    return { ...response, embeddings };
  }
  /** Return token vectors, attention or both for each text. */
  encode(inputs, options) {
    return this.results("encode", "inputs", inputs, options, checkEncodedText);
  }
  /** Yield the results of `encode` in parts, which may exceed the limit of a response. Leaving the loop cancels the call. */
  async *encodeStream(inputs, options) {
    const { signal, ...fields } = options ?? {};
    const texts = listOf2(inputs);
    const check2 = new StreamCheck(texts.length);
    for await (const line of this.transport.lines("encode_stream", { ...fields, inputs: texts, arrays: "base64" }, signal)) {
      const part = decodeTensors(line);
      check2.part(part);
      yield part;
    }
    check2.end();
  }
  /** Return the tokens of each text. */
  tokenize(inputs, options) {
    return this.results("tokenize", "inputs", inputs, { ...options, arrays: void 0 }, checkEncodedText);
  }
  /** Return how much each token of a text contributes to its embedding or to a similarity. */
  explain(inputs, options) {
    return this.results("explain", "inputs", inputs, options, checkExplanation);
  }
  /** Return how much each token of two texts contributes to their similarity. */
  compare(pairs, options) {
    return this.results("compare", "pairs", pairs, options, checkComparison);
  }
  /** Return the attention weights of each text. Defaults to all heads of all layers. */
  attention(inputs, options) {
    return this.results("attention", "inputs", inputs, options, checkEncodedText);
  }
  /** Return the relevance of documents to a query, sorted by descending logit. Needs a reranker. */
  score(query, documents, options) {
    return this.scores({ query, documents: listOf2(documents) }, listOf2(documents).length, options);
  }
  /** Return the relevance of the second to the first text of each pair. Needs a reranker. */
  scorePairs(pairs, options) {
    return this.scores({ pairs: listOf2(pairs) }, listOf2(pairs).length, options);
  }
  /** Return the logit and score of each label for each text. Needs a classifier. */
  async classify(inputs, options) {
    const response = await this.call("classify", { inputs: listOf2(inputs) }, options);
    checkClasses(response, listOf2(inputs).length);
    return response;
  }
  /** Return the models of the server. */
  async models(options) {
    const response = await this.transport.request("models", void 0, options?.signal);
    checkObject(response);
    return checkedObjects(response.models, "models");
  }
  async call(path, fields, options = {}) {
    const { signal, ...rest } = options;
    const body = { arrays: "base64", ...rest, ...fields };
    const response = decodeTensors(await this.transport.request(path, body, signal));
    checkObject(response);
    return response;
  }
  /** Call a method with one result for each input. */
  async results(path, name, inputs, options, check2) {
    const list = listOf2(inputs);
    const response = await this.call(path, { [name]: list }, options);
    checkedObjects(response.results, "results", list.length).forEach(check2);
    return response;
  }
  async scores(fields, count, options) {
    const response = await this.call("score", fields, options);
    checkScores(response, count, Math.min(options?.top_n || count, count));
    return response;
  }
};
var EMBEDDING_ARRAYS = { unspecified: Float32Array, float: Float32Array, int8: Int8Array, uint8: Uint8Array, binary: Int8Array, ubinary: Uint8Array };
function listOf2(values) {
  return Array.isArray(values) ? values : [values];
}
export {
  AttnlensClient,
  AttnlensError,
  BadResponseError,
  ConnectionError,
  DeadlineExceededError,
  ERROR_CLASSES,
  GraphUnavailableError,
  InputTooLongError,
  InternalError,
  InvalidFieldError,
  MalformedRequestError,
  ModelNotFoundError,
  NotReadyError,
  NotSupportedError,
  OverloadedError,
  PermissionDeniedError,
  RateLimitedError,
  RequestTooExpensiveError,
  RequestTooLargeError,
  ResponseTooLargeError,
  ShuttingDownError,
  SlowConsumerError,
  Tensor,
  UnauthenticatedError,
  decodeTensor,
  errorFrom
};
