// Errors of the client: one class for each reason of attnlens.v1.ErrorReason, and two for failures without a reason.

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

/** Statuses of proxies and servers that may accept the same request later. */
const RETRYABLE_STATUSES = [429, 502, 503, 504];

/** Base class of all errors of calls. An aborted call rejects with the `reason` of its signal instead. */
export class AttnlensError extends Error {
  override name = "AttnlensError";
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

  constructor(
    message: string,
    /** Parsed body of the response. */
    readonly body: ErrorBody = {},
    { status = 0, headers, cause }: ErrorSource = {},
  ) {
    super(message, cause === undefined ? undefined : { cause });
    this.status = status;
    this.reason = body.reason ?? "";
    this.violations = body.violations ?? [];
    this.metadata = body.metadata ?? {};
    this.requestId = headers?.get("x-request-id") ?? "";
    this.retryAfterMs = headers ? retryAfterMs(headers) : null;
    const advice = headers?.get("x-should-retry");
    this.retryable = advice ? advice === "true" : this.retryAfterMs !== null || RETRYABLE_STATUSES.includes(status);
  }
}

/** A field has an invalid value: see `violations`. */
export class InvalidFieldError extends AttnlensError {
  override name = "InvalidFieldError";
}
/** A text has too many tokens, and `truncate` is not set. */
export class InputTooLongError extends AttnlensError {
  override name = "InputTooLongError";
}
/** The response would exceed the server's limit. Use `encodeStream`, or send fewer texts. */
export class ResponseTooLargeError extends AttnlensError {
  override name = "ResponseTooLargeError";
}
/** The request exceeds a limit of the server. */
export class RequestTooLargeError extends AttnlensError {
  override name = "RequestTooLargeError";
}
/** The estimated computation exceeds the server's limit. */
export class RequestTooExpensiveError extends AttnlensError {
  override name = "RequestTooExpensiveError";
}
/** The request is not valid JSON. */
export class MalformedRequestError extends AttnlensError {
  override name = "MalformedRequestError";
}
/** The requested model is not loaded: see `metadata.available`. */
export class ModelNotFoundError extends AttnlensError {
  override name = "ModelNotFoundError";
}
/** The bundle or the server's settings do not support the method. */
export class NotSupportedError extends AttnlensError {
  override name = "NotSupportedError";
}
/** The API key is missing or invalid. */
export class UnauthenticatedError extends AttnlensError {
  override name = "UnauthenticatedError";
}
/** The API key does not permit the call. */
export class PermissionDeniedError extends AttnlensError {
  override name = "PermissionDeniedError";
}
/** The server was overloaded, after all retries. */
export class OverloadedError extends AttnlensError {
  override name = "OverloadedError";
}
/** The client sent too many requests, after all retries. */
export class RateLimitedError extends AttnlensError {
  override name = "RateLimitedError";
}
/** The server is starting, after all retries. */
export class NotReadyError extends AttnlensError {
  override name = "NotReadyError";
}
/** The server is shutting down, after all retries. */
export class ShuttingDownError extends AttnlensError {
  override name = "ShuttingDownError";
}
/** The call took longer than `timeoutMs`, or than the server permits. */
export class DeadlineExceededError extends AttnlensError {
  override name = "DeadlineExceededError";
}
/** A stream was read too slowly. */
export class SlowConsumerError extends AttnlensError {
  override name = "SlowConsumerError";
}
/** A graph of the bundle cannot be opened. */
export class GraphUnavailableError extends AttnlensError {
  override name = "GraphUnavailableError";
}
/** Internal error of the server: see `metadata.error_id` and the server's log. */
export class InternalError extends AttnlensError {
  override name = "InternalError";
}
/** No response was received, after all retries: no server, or in a browser, an origin that it does not allow. */
export class ConnectionError extends AttnlensError {
  override name = "ConnectionError";
  override readonly retryable = true;
}
/** The response of a successful request is invalid. */
export class BadResponseError extends AttnlensError {
  override name = "BadResponseError";
}

/** Class of the errors with each reason. Other reasons have `AttnlensError`. */
export const ERROR_CLASSES: Readonly<Record<string, typeof AttnlensError>> = {
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
  INTERNAL: InternalError,
};

/** Return the error that a body describes. Bodies of proxies and of other programs have other fields. */
export function errorFrom(body: unknown, source: ErrorSource): AttnlensError {
  const isOwn = typeof body === "object" && body !== null && "error" in body && typeof body.error === "string";
  const known: ErrorBody = isOwn ? { ...(body as object), ...ownFields(body as Record<string, unknown>) } : {};
  const reason = known.reason ?? "";
  const errorClass = Object.hasOwn(ERROR_CLASSES, reason) ? ERROR_CLASSES[reason] : AttnlensError;
  return new errorClass(known.error ?? `the server responded with status ${source.status}`, known, source);
}

/** Return the fields that have the expected types. */
function ownFields({ error, reason, violations, metadata }: Record<string, unknown>): ErrorBody {
  const isText = (value: unknown): value is string => typeof value === "string";
  return {
    error: isText(error) ? error : undefined,
    reason: isText(reason) ? reason : undefined,
    violations: Array.isArray(violations) ? violations.filter((violation) => isText(violation?.field) && isText(violation?.description)) : [],
    metadata: Object.fromEntries(Object.entries(metadata ?? {}).filter(([, value]) => isText(value))),
  };
}

function retryAfterMs(headers: Headers): number | null {
  const [ms, value] = [headers.get("retry-after-ms"), headers.get("retry-after")];
  if (ms === null && value === null) return null;
  const seconds = Number(value);
  const delay = ms !== null ? Number(ms) : Number.isNaN(seconds) ? Date.parse(value ?? "") - Date.now() : 1000 * seconds;
  return Number.isNaN(delay) ? null : Math.max(0, delay);
}
