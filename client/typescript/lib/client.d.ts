import type { components } from "./schema.js";
import { Tensor, type TypedArray } from "./tensor.js";
import { type TransportOptions } from "./transport.js";
type Messages = components["schemas"];
type Message<Name extends string> = Messages[`attnlens.v1.${Name}` & keyof Messages];
/** A message of the server with its arrays decoded. */
export type Decoded<T> = [Message<"Tensor">] extends [T] ? Tensor : T extends object ? {
    [Key in keyof T]: Decoded<T[Key]>;
} : T;
/** An array as lists. */
export type NestedList = (number | NestedList)[];
/** A field of a request. Arrays are tensors, typed arrays or nested lists. */
type Encodable<T> = [Message<"Tensor">] extends [NonNullable<T>] ? Tensor | TypedArray | NestedList : T;
type InputKey = "inputs" | "pairs" | "query" | "documents" | "arrays";
/** Fields of a request other than its inputs, and a signal that aborts the call. */
type Options<Request> = {
    [Key in keyof Request as Exclude<Key, InputKey>]: Encodable<Request[Key]>;
} & {
    signal?: AbortSignal;
};
/** A text, or an object with `text`, `text_pair` or `token_ids`. */
export type Input = Message<"Input">;
export type Pair = Message<"ComparedPair">;
export type TextPair = Message<"TextPair">;
export type Model = Message<"Model">;
export type EmbedOptions = Options<Message<"EmbedRequest">>;
export type EncodeOptions = Options<Message<"EncodeRequest">>;
export type EncodeStreamOptions = Options<Message<"EncodeStreamRequest">>;
export type TokenizeOptions = Options<Message<"TokenizeRequest">>;
export type ExplainOptions = Options<Message<"ExplainRequest">>;
export type CompareOptions = Options<Message<"CompareRequest">>;
export type ScoreOptions = Options<Message<"ScoreRequest">>;
export type ClassifyOptions = Options<Message<"ClassifyRequest">>;
export type EncodeResult = Decoded<Message<"EncodeResponse">>;
export type EncodePart = Decoded<Message<"EncodeStreamResponse">>;
export type TokenizeResult = Decoded<Message<"TokenizeResponse">>;
export type ExplainResult = Decoded<Message<"ExplainResponse">>;
export type CompareResult = Decoded<Message<"CompareResponse">>;
export type ScoreResult = Decoded<Message<"ScoreResponse">>;
export type ClassifyResult = Decoded<Message<"ClassifyResponse">>;
/** One embedding for each text. All embeddings share one buffer. */
export interface EmbedResult<Row extends TypedArray = Float32Array> extends Omit<Decoded<Message<"EmbedResponse">>, "embeddings"> {
    embeddings: Row[];
}
export interface ClientOptions extends TransportOptions {
    /** URL of the server, such as `http://127.0.0.1:8080`. */
    baseUrl: string;
}
/**
 * Client of an attnlens server with an HTTP port, for browsers and Node.js. It may be shared by concurrent calls.
 *
 * All methods throw an `AttnlensError`, or the reason of `signal` if the call was aborted.
 */
export declare class AttnlensClient {
    private readonly transport;
    constructor({ baseUrl, ...options }: ClientOptions);
    /** Return one embedding for each text. */
    embed(inputs: Input | Input[], options?: EmbedOptions & {
        embedding_type?: "float";
    }): Promise<EmbedResult>;
    embed(inputs: Input | Input[], options: EmbedOptions): Promise<EmbedResult<TypedArray>>;
    /** Return token vectors, attention or both for each text. */
    encode(inputs: Input | Input[], options?: EncodeOptions): Promise<EncodeResult>;
    /** Yield the results of `encode` in parts, which may exceed the limit of a response. Leaving the loop cancels the call. */
    encodeStream(inputs: Input | Input[], options?: EncodeStreamOptions): AsyncGenerator<EncodePart, void, undefined>;
    /** Return the tokens of each text. */
    tokenize(inputs: Input | Input[], options?: TokenizeOptions): Promise<TokenizeResult>;
    /** Return how much each token of a text contributes to its embedding or to a similarity. */
    explain(inputs: Input | Input[], options?: ExplainOptions): Promise<ExplainResult>;
    /** Return how much each token of two texts contributes to their similarity. */
    compare(pairs: Pair | Pair[], options?: CompareOptions): Promise<CompareResult>;
    /** Return the attention weights of each text. Defaults to all heads of all layers. */
    attention(inputs: Input | Input[], options?: EncodeOptions): Promise<EncodeResult>;
    /** Return the relevance of documents to a query, sorted by descending logit. Needs a reranker. */
    score(query: string, documents: string | string[], options?: ScoreOptions): Promise<ScoreResult>;
    /** Return the relevance of the second to the first text of each pair. Needs a reranker. */
    scorePairs(pairs: TextPair | TextPair[], options?: ScoreOptions): Promise<ScoreResult>;
    /** Return the logit and score of each label for each text. Needs a classifier. */
    classify(inputs: Input | Input[], options?: ClassifyOptions): Promise<ClassifyResult>;
    /** Return the models of the server. */
    models(options?: {
        signal?: AbortSignal;
    }): Promise<Model[]>;
    private call;
    /** Call a method with one result for each input. */
    private results;
    private scores;
}
export {};
