export * from "./client.js";
export * from "./errors.js";
export { Tensor, decodeTensor, type EncodedTensor, type TypedArray } from "./tensor.js";
export type { TransportOptions } from "./transport.js";
export type { components } from "./schema.js";
