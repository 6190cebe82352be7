// Arrays of responses: typed arrays with a shape, decoded from base64.
import { BadResponseError } from "./errors.js";

export type TypedArray = Float32Array | Int32Array | Int8Array | Uint8Array;

/** An array as the server sends it. */
export interface EncodedTensor {
  shape: number[];
  data_type: string;
  data: string; // base64, little-endian
}

const ARRAY_TYPES = { float32: Float32Array, float16: Uint16Array, int32: Int32Array, int8: Int8Array, uint8: Uint8Array };
const MAX_DEPTH = 50;
const HOST_IS_LITTLE_ENDIAN = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;

/** A dense array in row-major order. */
export class Tensor {
  constructor(
    /** Length of each axis, outermost first. */
    readonly shape: readonly number[],
    readonly data: TypedArray,
  ) {}

  /**
   * Return the part with the given indices of the first axes. It shares the memory of this tensor.
   * Negative indices count from the end. A RangeError is thrown for an index that is out of range.
   */
  at(...indices: number[]): Tensor {
    let { shape, data } = this as Tensor;
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
    return new Tensor(shape, data);
  }

  /** Rows of a matrix, or the parts along the first axis as flat arrays. They share the memory of this tensor. */
  get rows(): TypedArray[] {
    return Array.from({ length: this.shape[0] ?? 0 }, (_, index) => this.at(index).data);
  }

  /** Iterate over the numbers of a vector, or the parts of another array along its first axis. */
  *[Symbol.iterator](): Generator<number | Tensor, void, undefined> {
    if (this.shape.length < 2) yield* this.data;
    else for (let index = 0; index < this.shape[0]; index++) yield this.at(index);
  }

  /** Return nested lists, which requests accept. */
  toJSON(): unknown {
    if (this.shape.length === 0) return this.data[0];
    if (this.shape.length === 1) return Array.from(this.data);
    return Array.from({ length: this.shape[0] }, (_, index) => this.at(index).toJSON());
  }
}

/**
 * Replace the encoded arrays in a JSON value, and return the value.
 *
 * @throws BadResponseError: An array is invalid, or the value is nested too deeply.
 */
export function decodeTensors(value: unknown, depth = 0): unknown {
  if (typeof value !== "object" || value === null) return value;
  if (isEncoded(value)) return decodeTensor(value);
  if (depth === MAX_DEPTH) throw new BadResponseError(`the response has more than ${MAX_DEPTH} levels`);
  const fields = value as Record<string, unknown>;
  for (const key of Object.keys(fields)) {
    if (typeof fields[key] === "object") fields[key] = decodeTensors(fields[key], depth + 1);
  }
  return value;
}

function isEncoded(value: object): value is EncodedTensor {
  return "data" in value && "data_type" in value && "shape" in value;
}

/**
 * Decode an array. Half-precision numbers become Float32Array, which is exact.
 *
 * @throws BadResponseError: The element type is unknown, or the data does not match the shape.
 */
export function decodeTensor({ shape, data_type: name, data }: EncodedTensor, hostIsLittleEndian = HOST_IS_LITTLE_ENDIAN): Tensor {
  if (!Array.isArray(shape) || !shape.every((length) => Number.isSafeInteger(length) && length >= 0) || typeof data !== "string") {
    throw new BadResponseError("a tensor has no valid shape or data");
  }
  if (typeof name !== "string" || !Object.hasOwn(ARRAY_TYPES, name)) {
    throw new BadResponseError(`unknown element type ${JSON.stringify(name)}: use a newer client`);
  }
  const ArrayType = ARRAY_TYPES[name as keyof typeof ARRAY_TYPES];
  const bytes = fromBase64(data);
  const size = ArrayType.BYTES_PER_ELEMENT;
  if (bytes.length !== product(shape) * size) {
    throw new BadResponseError(`a tensor of shape [${shape}] has ${bytes.length} bytes, which do not match its type ${name}`);
  }
  if (!hostIsLittleEndian) {
    for (let start = 0; start < bytes.length; start += size) bytes.subarray(start, start + size).reverse();
  }
  const array = new ArrayType(bytes.buffer); // aligned, because `bytes` begins at offset 0
  return new Tensor(shape, array instanceof Uint16Array ? Float32Array.from(array, fromHalf) : array);
}

function fromBase64(text: string): Uint8Array<ArrayBuffer> {
  const native = Uint8Array as unknown as { fromBase64?: (text: string) => Uint8Array<ArrayBuffer> };
  try {
    return native.fromBase64?.(text) ?? Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  } catch (cause) {
    throw new BadResponseError("a tensor is not valid base64", {}, { cause });
  }
}

function fromHalf(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}

function product(lengths: readonly number[]): number {
  return lengths.reduce((size, length) => size * length, 1);
}
