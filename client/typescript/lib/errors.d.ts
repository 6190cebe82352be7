/** An invalid field of a request. */
export interface FieldViolation {
    /** Path of the field, such as `inputs[3].text`. */
    field: string;
    /** Problem, limit and remedy, worded to follow the path. */
    description: string;
}
/** Body of an error response. */
export interface ErrorBody {
    error?: string;
    reason?: string;
    violations?: FieldViolation[];
    metadata?: Record<string, string>;
}
/** Context of an error: its response, or the underlying error. */
export interface ErrorSource {
    status?: number;
    headers?: Headers;
    cause?: unknown;
}
/** Base class of all errors of calls. An aborted call rejects with the `reason` of its signal instead. */
export declare class AttnlensError extends Error {
    /** Parsed body of the response. */
    readonly body: ErrorBody;
    name: string;
    /** HTTP status. 200 if a stream failed after it had started, 0 if there was no response. */
    readonly status: number;
    /** Name of a reason, such as `INPUT_TOO_LONG`. Empty if the error does not come from an attnlens server. */
    readonly reason: string;
    /** Invalid fields. */
    readonly violations: readonly FieldViolation[];
    /** Values by name, such as `num_tokens` and `max_tokens` of `InputTooLongError`. */
    readonly metadata: Readonly<Record<string, string>>;
    /** Identifier of the request in the server's log. Empty if there was no response. */
    readonly requestId: string;
    /** Retry delay from the server in milliseconds, or null. */
    readonly retryAfterMs: number | null;
    /** Whether the same request may succeed later. */
    readonly retryable: boolean;
    constructor(message: string, 
    /** Parsed body of the response. */
    body?: ErrorBody, { status, headers, cause }?: ErrorSource);
}
/** A field has an invalid value: see `violations`. */
export declare class InvalidFieldError extends AttnlensError {
    name: string;
}
/** A text has too many tokens, and `truncate` is not set. */
export declare class InputTooLongError extends AttnlensError {
    name: string;
}
/** The response would exceed the server's limit. Use `encodeStream`, or send fewer texts. */
export declare class ResponseTooLargeError extends AttnlensError {
    name: string;
}
/** The request exceeds a limit of the server. */
export declare class RequestTooLargeError extends AttnlensError {
    name: string;
}
/** The estimated computation exceeds the server's limit. */
export declare class RequestTooExpensiveError extends AttnlensError {
    name: string;
}
/** The request is not valid JSON. */
export declare class MalformedRequestError extends AttnlensError {
    name: string;
}
/** The requested model is not loaded: see `metadata.available`. */
export declare class ModelNotFoundError extends AttnlensError {
    name: string;
}
/** The bundle or the server's settings do not support the method. */
export declare class NotSupportedError extends AttnlensError {
    name: string;
}
/** The API key is missing or invalid. */
export declare class UnauthenticatedError extends AttnlensError {
    name: string;
}
/** The API key does not permit the call. */
export declare class PermissionDeniedError extends AttnlensError {
    name: string;
}
/** The server was overloaded, after all retries. */
export declare class OverloadedError extends AttnlensError {
    name: string;
}
/** The client sent too many requests, after all retries. */
export declare class RateLimitedError extends AttnlensError {
    name: string;
}
/** The server is starting, after all retries. */
export declare class NotReadyError extends AttnlensError {
    name: string;
}
/** The server is shutting down, after all retries. */
export declare class ShuttingDownError extends AttnlensError {
    name: string;
}
/** The call took longer than `timeoutMs`, or than the server permits. */
export declare class DeadlineExceededError extends AttnlensError {
    name: string;
}
/** A stream was read too slowly. */
export declare class SlowConsumerError extends AttnlensError {
    name: string;
}
/** A graph of the bundle cannot be opened. */
export declare class GraphUnavailableError extends AttnlensError {
    name: string;
}
/** Internal error of the server: see `metadata.error_id` and the server's log. */
export declare class InternalError extends AttnlensError {
    name: string;
}
/** No response was received, after all retries: no server, or in a browser, an origin that it does not allow. */
export declare class ConnectionError extends AttnlensError {
    name: string;
    readonly retryable = true;
}
/** The response of a successful request is invalid. */
export declare class BadResponseError extends AttnlensError {
    name: string;
}
/** Class of the errors with each reason. Other reasons have `AttnlensError`. */
export declare const ERROR_CLASSES: Readonly<Record<string, typeof AttnlensError>>;
/** Return the error that a body describes. Bodies of proxies and of other programs have other fields. */
export declare function errorFrom(body: unknown, source: ErrorSource): AttnlensError;
