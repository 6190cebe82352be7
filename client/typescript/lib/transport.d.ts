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
/** Sends JSON requests. */
export declare class Transport {
    private readonly options;
    private readonly base;
    private readonly headers;
    private readonly timeoutMs;
    private readonly maxRetries;
    private readonly maxBytes;
    constructor(
    /** URL, or a prefix of relative URLs in browsers. */
    baseUrl: string, options?: TransportOptions);
    /** Return the JSON value of a response. Without a body, the request is a GET request. */
    request(path: string, body?: unknown, signal?: AbortSignal): Promise<unknown>;
    /** Yield the JSON value of each line of a response. Leaving the loop cancels the request. */
    lines(path: string, body: unknown, signal?: AbortSignal): AsyncGenerator<unknown, void, undefined>;
    private send;
}
