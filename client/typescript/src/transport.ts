// Requests with a time limit, cancellation and retries.
import { AttnlensError, BadResponseError, ConnectionError, DeadlineExceededError, errorFrom } from "./errors.js";

/** Settings of all requests. */
export interface TransportOptions {
  /** Sent as `Authorization: Bearer KEY`. */
  apiKey?: string;
  /** Additional headers of each request. */
  headers?: Record<string, string>;
  /** Function to use instead of the global `fetch`. */
  fetch?: typeof fetch;
  /** Maximum duration of a call with all retries, in milliseconds. For a stream, of each wait. Defaults to 60000. */
  timeoutMs?: number;
  /** Maximum number of retries of a call that failed for a temporary reason. Defaults to 3. */
  maxRetries?: number;
  /** Maximum size of a response, or of a line of a stream, in bytes. Defaults to 256 MiB. */
  maxResponseBytes?: number;
}

const FIRST_DELAY_MS = 200;
const MAX_DELAY_MS = 5000;
const MAX_ERROR_BYTES = 1 << 20;
const MAX_TIMER_MS = 2 ** 31 - 1; // longer timers would expire immediately

/** Sends JSON requests. */
export class Transport {
  private readonly base: string;
  private readonly headers: Record<string, string>;
  private readonly timeoutMs: number;
  private readonly maxRetries: number;
  private readonly maxBytes: number;

  constructor(
    /** URL, or a prefix of relative URLs in browsers. */
    baseUrl: string,
    private readonly options: TransportOptions = {},
  ) {
    this.base = baseUrl.replace(/\/+$/, "");
    this.timeoutMs = Math.min(options.timeoutMs ?? 60_000, MAX_TIMER_MS);
    this.maxRetries = options.maxRetries ?? 3;
    this.maxBytes = options.maxResponseBytes ?? 256 << 20;
    const { apiKey } = options;
    this.headers = { "Content-Type": "application/json", ...(apiKey && { Authorization: `Bearer ${apiKey}` }), ...options.headers };
  }

  /** Return the JSON value of a response. Without a body, the request is a GET request. */
  async request(path: string, body?: unknown, signal?: AbortSignal): Promise<unknown> {
    const call = new Call(this.timeoutMs, signal);
    try {
      return await this.send(call, path, body, async (response) => parse(await textOf(response, this.maxBytes), response));
    } finally {
      call.end();
    }
  }

  /** Yield the JSON value of each line of a response. Leaving the loop cancels the request. */
  async *lines(path: string, body: unknown, signal?: AbortSignal): AsyncGenerator<unknown, void, undefined> {
    const call = new Call(this.timeoutMs, signal);
    try {
      const response = await this.send(call, path, body, async (response) => response);
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

  private async send<Result>(
    call: Call,
    path: string,
    body: unknown,
    read: (response: Response) => Promise<Result>,
  ): Promise<Result> {
    const url = this.base ? `${this.base}/${path}` : path;
    const content = body === undefined ? undefined : JSON.stringify(body, (_, value) => (ArrayBuffer.isView(value) ? listOf(value) : value));
    const method = content === undefined ? "GET" : "POST";
    // Another host must not receive the headers, which may contain a key.
    const init: RequestInit = { method, headers: this.headers, body: content, redirect: "error" };
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
}

/** Time limit and cancellation of a call. */
class Call {
  private readonly controller = new AbortController();
  private readonly abort: () => void;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private endsAt = 0;

  constructor(
    private readonly timeoutMs: number,
    private readonly signal: AbortSignal | undefined,
  ) {
    this.abort = () => this.controller.abort(signal?.reason);
    if (signal?.aborted) this.abort();
    else signal?.addEventListener("abort", this.abort);
    this.restart();
  }

  /** Start the time limit again. */
  restart(): void {
    this.stop();
    this.endsAt = performance.now() + this.timeoutMs;
    const message = `no response within ${this.timeoutMs} ms: check that the server is reachable, or use a larger timeoutMs`;
    this.timer = setTimeout(() => this.controller.abort(new DeadlineExceededError(message)), this.timeoutMs);
  }

  /** Stop the time limit. */
  stop(): void {
    clearTimeout(this.timer);
  }

  /** Return the result of a function. If the call was aborted, reject with the reason. */
  async run<Result>(action: (signal: AbortSignal) => Promise<Result>): Promise<Result> {
    const { signal } = this.controller;
    signal.throwIfAborted();
    let abort: () => void = () => undefined;
    const aborted = new Promise<never>((_, reject) => {
      abort = () => reject(signal.reason);
      signal.addEventListener("abort", abort);
    });
    try {
      return await Promise.race([action(signal), aborted]); // a custom `fetch` may ignore the signal
    } catch (cause) {
      signal.throwIfAborted();
      if (cause instanceof AttnlensError) throw cause;
      throw connectionError(cause);
    } finally {
      signal.removeEventListener("abort", abort);
    }
  }

  /** Wait before a retry. Throw `error` if there is no time for it. */
  async wait(delayMs: number, error: AttnlensError): Promise<void> {
    if (performance.now() + delayMs >= this.endsAt) throw error;
    const { signal } = this.controller;
    await new Promise<void>((resolve, reject) => {
      const timer = setTimeout(resolve, delayMs);
      signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
    });
  }

  /** Release the time limit, and cancel a response that was not read completely. */
  end(): void {
    this.stop();
    this.signal?.removeEventListener("abort", this.abort);
    this.controller.abort();
  }
}

/** Return the error for a failed `fetch`. Its message contains the reason, which Node.js reports and browsers hide. */
function connectionError(cause: unknown): AttnlensError {
  const reason = [(cause as Error | null)?.cause, cause].map((error) => (error as Error | null)?.message).find(Boolean);
  const details = reason ? ` (${reason})` : "";
  if (/redirect/.test(details)) return new BadResponseError(`the server redirects to another URL: use that URL${details}`, {}, { cause });
  return new ConnectionError(`no response from the server: check the URL, and that it is running${details}`, {}, { cause });
}

function tooLarge(maxBytes: number): BadResponseError {
  return new BadResponseError(`the response, or a line of it, has more than ${maxBytes} bytes: use a larger maxResponseBytes`);
}

async function textOf(response: Response, maxBytes: number): Promise<string> {
  const reader = response.body?.getReader();
  const decoder = new TextDecoder();
  let [text, size] = ["", 0];
  for (;;) {
    const { done, value } = (await reader?.read()) ?? { done: true, value: undefined };
    if (done) return text + decoder.decode();
    size += value.length;
    if (size > maxBytes) {
      reader?.cancel().catch(() => undefined);
      throw tooLarge(maxBytes);
    }
    text += decoder.decode(value, { stream: true });
  }
}

async function* linesOf(response: Response, call: Call, maxBytes: number): AsyncGenerator<string, void, undefined> {
  const reader = response.body?.getReader();
  if (!reader) throw new BadResponseError("the response is empty: check the URL");
  const decoder = new TextDecoder();
  let parts: string[] = []; // of the current line
  let size = 0; // of the bytes that have arrived since its beginning
  try {
    for (;;) {
      call.restart();
      const { done, value } = await call.run(() => reader.read());
      call.stop(); // the caller may take any time
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
    reader.cancel().catch(() => undefined);
  }
  if (parts.join("") !== "") throw new BadResponseError("the stream ended within a line");
}

async function failureOf(response: Response): Promise<AttnlensError> {
  const text = await textOf(response, MAX_ERROR_BYTES).catch(() => "");
  let body: unknown;
  try {
    body = JSON.parse(text);
  } catch {
    body = null;
  }
  return errorFrom(body, response);
}

function parse(text: string, { status, headers }: Response): unknown {
  try {
    return JSON.parse(text);
  } catch (cause) {
    throw new BadResponseError("the response is not valid JSON: check the URL", {}, { status, headers, cause });
  }
}

function listOf(array: ArrayBufferView): number[] {
  return Array.from(array as Float32Array);
}
