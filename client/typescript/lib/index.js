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
  const known = isOwn ? body : {};
  const reason = known.reason ?? "";
  const errorClass = Object.hasOwn(ERROR_CLASSES, reason) ? ERROR_CLASSES[reason] : AttnlensError;
  return new errorClass(known.error ?? `the server responded with status ${source.status}`, known, source);
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
  /** Return nested lists, which requests accept. */
  toJSON() {
    if (this.shape.length === 0) return this.data[0];
    if (this.shape.length === 1) return Array.from(this.data);
    return Array.from({ length: this.shape[0] }, (_, index) => this.at(index).toJSON());
  }
};
function decodeTensors(value) {
  if (typeof value !== "object" || value === null) return value;
  if (isEncoded(value)) return decodeTensor(value);
  const fields = value;
  for (const key of Object.keys(fields)) {
    if (typeof fields[key] === "object") fields[key] = decodeTensors(fields[key]);
  }
  return value;
}
function isEncoded(value) {
  return "data" in value && "data_type" in value && "shape" in value;
}
function decodeTensor({ shape, data_type: name, data }, hostIsLittleEndian = HOST_IS_LITTLE_ENDIAN) {
  if (!Object.hasOwn(ARRAY_TYPES, name)) throw new BadResponseError(`unknown element type ${name}: use a newer client`);
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

// src/transport.ts
var FIRST_DELAY_MS = 200;
var MAX_DELAY_MS = 5e3;
var MAX_TIMER_MS = 2 ** 31 - 1;
var Transport = class {
  constructor(baseUrl, options = {}) {
    this.options = options;
    this.base = baseUrl.replace(/\/+$/, "");
    this.timeoutMs = Math.min(options.timeoutMs ?? 6e4, MAX_TIMER_MS);
    this.maxRetries = options.maxRetries ?? 3;
    const { apiKey } = options;
    this.headers = { "Content-Type": "application/json", ...apiKey && { Authorization: `Bearer ${apiKey}` }, ...options.headers };
  }
  options;
  base;
  headers;
  timeoutMs;
  maxRetries;
  /** Return the JSON value of a response. Without a body, the request is a GET request. */
  async request(path, body, signal) {
    const call = new Call(this.timeoutMs, signal);
    try {
      return await this.send(call, path, body, async (response) => parse(await response.text(), response));
    } finally {
      call.end();
    }
  }
  /** Yield the JSON value of each line of a response. Leaving the loop cancels the request. */
  async *lines(path, body, signal) {
    const call = new Call(this.timeoutMs, signal);
    try {
      const response = await this.send(call, path, body, async (response2) => response2);
      for await (const line of linesOf(response, call)) {
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
    const init = { method: content === void 0 ? "GET" : "POST", headers: this.headers, body: content };
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
    const message = `no response within ${this.timeoutMs} ms: use a larger timeoutMs`;
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
      throw new ConnectionError("no response from the server: check the URL, and that it is running", {}, { cause });
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
async function* linesOf(response, call) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let parts = [];
  try {
    for (; ; ) {
      call.restart();
      const { done, value } = await call.run(() => reader.read());
      call.stop();
      if (done) break;
      const [first, ...lines] = decoder.decode(value, { stream: true }).split("\n");
      parts.push(first);
      for (const line of lines) {
        yield parts.join("");
        parts = [line];
      }
    }
  } finally {
    reader.cancel().catch(() => void 0);
  }
  if (parts.join("") !== "") throw new BadResponseError("the stream ended within a line");
}
async function failureOf(response) {
  const body = await response.json().catch(() => null);
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
    const response = await this.call("embed", { inputs: listOf2(inputs) }, options);
    if (!(response.embeddings instanceof Tensor)) throw new BadResponseError("the response has no embeddings");
    return { ...response, embeddings: response.embeddings.rows };
  }
  /** Return token vectors, attention or both for each text. */
  encode(inputs, options) {
    return this.call("encode", { inputs: listOf2(inputs) }, options);
  }
  /** Yield the results of `encode` in parts, which may exceed the limit of a response. Leaving the loop cancels the call. */
  async *encodeStream(inputs, options) {
    const { signal, ...fields } = options ?? {};
    const body = { ...fields, inputs: listOf2(inputs), arrays: "base64" };
    for await (const part of this.transport.lines("encode_stream", body, signal)) yield decodeTensors(part);
  }
  /** Return the tokens of each text. */
  tokenize(inputs, options) {
    return this.call("tokenize", { inputs: listOf2(inputs), arrays: void 0 }, options);
  }
  /** Return how much each token of a text contributes to its embedding or to a similarity. */
  explain(inputs, options) {
    return this.call("explain", { inputs: listOf2(inputs) }, options);
  }
  /** Return how much each token of two texts contributes to their similarity. */
  compare(pairs, options) {
    return this.call("compare", { pairs: listOf2(pairs) }, options);
  }
  /** Return the attention weights of each text. Defaults to all heads of all layers. */
  attention(inputs, options) {
    return this.call("attention", { inputs: listOf2(inputs) }, options);
  }
  /** Return the relevance of documents to a query, sorted by descending logit. Needs a reranker. */
  score(query, documents, options) {
    return this.call("score", { query, documents: listOf2(documents) }, options);
  }
  /** Return the relevance of the second to the first text of each pair. Needs a reranker. */
  scorePairs(pairs, options) {
    return this.call("score", { pairs: listOf2(pairs) }, options);
  }
  /** Return the logit and score of each label for each text. Needs a classifier. */
  classify(inputs, options) {
    return this.call("classify", { inputs: listOf2(inputs) }, options);
  }
  /** Return the models of the server. */
  async models(options) {
    const response = await this.transport.request("models", void 0, options?.signal);
    return response.models;
  }
  async call(path, fields, options = {}) {
    const { signal, ...rest } = options;
    const body = { arrays: "base64", ...rest, ...fields };
    return decodeTensors(await this.transport.request(path, body, signal));
  }
};
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
