export type TypedArray = Float32Array | Int32Array | Int8Array | Uint8Array;
/** An array as the server sends it. */
export interface EncodedTensor {
    shape: number[];
    data_type: string;
    data: string;
}
/** A dense array in row-major order. */
export declare class Tensor {
    /** Length of each axis, outermost first. */
    readonly shape: readonly number[];
    readonly data: TypedArray;
    constructor(
    /** Length of each axis, outermost first. */
    shape: readonly number[], data: TypedArray);
    /**
     * Return the part with the given indices of the first axes. It shares the memory of this tensor.
     * Negative indices count from the end. A RangeError is thrown for an index that is out of range.
     */
    at(...indices: number[]): Tensor;
    /** Rows of a matrix, or the parts along the first axis as flat arrays. They share the memory of this tensor. */
    get rows(): TypedArray[];
    /** Iterate over the numbers of a vector, or the parts of another array along its first axis. */
    [Symbol.iterator](): Generator<number | Tensor, void, undefined>;
    /** Return nested lists, which requests accept. */
    toJSON(): unknown;
}
/**
 * Replace the encoded arrays in a JSON value, and return the value.
 *
 * @throws BadResponseError: An array is invalid, or the value is nested too deeply.
 */
export declare function decodeTensors(value: unknown, depth?: number): unknown;
/**
 * Decode an array. Half-precision numbers become Float32Array, which is exact.
 *
 * @throws BadResponseError: The element type is unknown, or the data does not match the shape.
 */
export declare function decodeTensor({ shape, data_type: name, data }: EncodedTensor, hostIsLittleEndian?: boolean): Tensor;
