import { Tensor, type TypedArray } from "./tensor.js";
type Fields = Record<string, unknown>;
/** Expected length of each axis. Null matches any. */
type Shape = readonly (number | null)[];
/** Check that a value is an object. */
export declare function checkObject(value: unknown, name?: string): asserts value is Fields;
/** Return a value that must be a list of objects. */
export declare function checkedObjects(value: unknown, name: string, count?: number): Fields[];
/** Return a value that must be a tensor of finite numbers. With `gaps`, numbers may be NaN. */
export declare function checkedTensor(value: unknown, name: string, shape: Shape, { type, gaps }?: {
    type?: Function;
    gaps?: boolean;
}): Tensor;
/** Check the model and the number of tokens of each text. */
export declare function checkUsages(response: Fields, count: number): void;
/** Check one embedding for each text. */
export declare function checkEmbeddings(response: Fields, count: number, type: Function): TypedArray[];
/** Check tokens, token vectors and attention of a text. */
export declare function checkEncodedText(text: Fields): void;
/** Check the attention of a text with this number of tokens, or of any number. */
export declare function checkAttention(result: Fields, numTokens: number | null): void;
/** Return the number of units of an explanation. */
export declare function checkExplanation(value: unknown): number;
/** Check the comparison of a pair. */
export declare function checkComparison(result: Fields): void;
/** Check scores of `count` documents or pairs, of which a response may have fewer. */
export declare function checkScores(response: Fields, count: number, numResults: number): void;
/** Check logits and scores of each text for each label. */
export declare function checkClasses(response: Fields, count: number): void;
/** Check the parts of a stream, which has each text once and in order. */
export declare class StreamCheck {
    private readonly count;
    private index;
    private numTokens;
    private left;
    constructor(count: number);
    part(value: unknown): void;
    end(): void;
    private checkEnd;
}
export {};
