// The methods of a server as functions with the types of its messages.
import type { components } from "./schema.js";
import {
  StreamCheck,
  checkClasses,
  checkComparison,
  checkEmbeddings,
  checkEncodedText,
  checkExplanation,
  checkObject,
  checkScores,
  checkedObjects,
} from "./checks.js";
import { Tensor, decodeTensors, type TypedArray } from "./tensor.js";
import { Transport, type TransportOptions } from "./transport.js";

type Messages = components["schemas"];
type Message<Name extends string> = Messages[`attnlens.v1.${Name}` & keyof Messages];

/** A message of the server with its arrays decoded. */
export type Decoded<T> = [Message<"Tensor">] extends [T]
  ? Tensor
  : T extends object
    ? { [Key in keyof T]: Decoded<T[Key]> }
    : T;

/** An array as lists. */
export type NestedList = (number | NestedList)[];

/** A field of a request. Arrays are tensors, typed arrays or nested lists. */
type Encodable<T> = [Message<"Tensor">] extends [NonNullable<T>] ? Tensor | TypedArray | NestedList : T;

type InputKey = "inputs" | "pairs" | "query" | "documents" | "arrays";

/** Fields of a request other than its inputs, and a signal that aborts the call. */
type Options<Request> = { [Key in keyof Request as Exclude<Key, InputKey>]: Encodable<Request[Key]> } & {
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
export class AttnlensClient {
  private readonly transport: Transport;

  constructor({ baseUrl, ...options }: ClientOptions) {
    this.transport = new Transport(`${baseUrl.replace(/\/+$/, "")}/v1/attnlens`, options);
  }

  /** Return one embedding for each text. */
  embed(inputs: Input | Input[], options?: EmbedOptions & { embedding_type?: "float" }): Promise<EmbedResult>;
  embed(inputs: Input | Input[], options: EmbedOptions): Promise<EmbedResult<TypedArray>>;
  async embed(inputs: Input | Input[], options?: EmbedOptions): Promise<EmbedResult<TypedArray>> {
    const texts = listOf(inputs);
    const response = await this.call("embed", { inputs: texts }, options);
    const embeddings = checkEmbeddings(response, texts.length, EMBEDDING_ARRAYS[options?.embedding_type ?? "float"]);
    return { ...(response as unknown as Decoded<Message<"EmbedResponse">>), embeddings };
  }

  /** Return token vectors, attention or both for each text. */
  encode(inputs: Input | Input[], options?: EncodeOptions): Promise<EncodeResult> {
    return this.results("encode", "inputs", inputs, options, checkEncodedText);
  }

  /** Yield the results of `encode` in parts, which may exceed the limit of a response. Leaving the loop cancels the call. */
  async *encodeStream(inputs: Input | Input[], options?: EncodeStreamOptions): AsyncGenerator<EncodePart, void, undefined> {
    const { signal, ...fields } = options ?? {};
    const texts = listOf(inputs);
    const check = new StreamCheck(texts.length);
    for await (const line of this.transport.lines("encode_stream", { ...fields, inputs: texts, arrays: "base64" }, signal)) {
      const part = decodeTensors(line);
      check.part(part);
      yield part as EncodePart;
    }
    check.end();
  }

  /** Return the tokens of each text. */
  tokenize(inputs: Input | Input[], options?: TokenizeOptions): Promise<TokenizeResult> {
    return this.results("tokenize", "inputs", inputs, { ...options, arrays: undefined }, checkEncodedText);
  }

  /** Return how much each token of a text contributes to its embedding or to a similarity. */
  explain(inputs: Input | Input[], options?: ExplainOptions): Promise<ExplainResult> {
    return this.results("explain", "inputs", inputs, options, checkExplanation);
  }

  /** Return how much each token of two texts contributes to their similarity. */
  compare(pairs: Pair | Pair[], options?: CompareOptions): Promise<CompareResult> {
    return this.results("compare", "pairs", pairs, options, checkComparison);
  }

  /** Return the attention weights of each text. Defaults to all heads of all layers. */
  attention(inputs: Input | Input[], options?: EncodeOptions): Promise<EncodeResult> {
    return this.results("attention", "inputs", inputs, options, checkEncodedText);
  }

  /** Return the relevance of documents to a query, sorted by descending logit. Needs a reranker. */
  score(query: string, documents: string | string[], options?: ScoreOptions): Promise<ScoreResult> {
    return this.scores({ query, documents: listOf(documents) }, listOf(documents).length, options);
  }

  /** Return the relevance of the second to the first text of each pair. Needs a reranker. */
  scorePairs(pairs: TextPair | TextPair[], options?: ScoreOptions): Promise<ScoreResult> {
    return this.scores({ pairs: listOf(pairs) }, listOf(pairs).length, options);
  }

  /** Return the logit and score of each label for each text. Needs a classifier. */
  async classify(inputs: Input | Input[], options?: ClassifyOptions): Promise<ClassifyResult> {
    const response = await this.call("classify", { inputs: listOf(inputs) }, options);
    checkClasses(response, listOf(inputs).length);
    return response as unknown as ClassifyResult;
  }

  /** Return the models of the server. */
  async models(options?: { signal?: AbortSignal }): Promise<Model[]> {
    const response = await this.transport.request("models", undefined, options?.signal);
    checkObject(response);
    return checkedObjects(response.models, "models") as unknown as Model[];
  }

  private async call(path: string, fields: object, options: { signal?: AbortSignal } = {}): Promise<Record<string, unknown>> {
    const { signal, ...rest } = options;
    const body = { arrays: "base64", ...rest, ...fields };
    const response = decodeTensors(await this.transport.request(path, body, signal));
    checkObject(response);
    return response;
  }

  /** Call a method with one result for each input. */
  private async results<Result>(
    path: string,
    name: string,
    inputs: unknown,
    options: object | undefined,
    check: (result: Record<string, unknown>) => void,
  ): Promise<Result> {
    const list = listOf(inputs);
    const response = await this.call(path, { [name]: list }, options);
    checkedObjects(response.results, "results", list.length).forEach(check);
    return response as Result;
  }

  private async scores(fields: object, count: number, options?: ScoreOptions): Promise<ScoreResult> {
    const response = await this.call("score", fields, options);
    checkScores(response, count, Math.min(options?.top_n || count, count));
    return response as unknown as ScoreResult;
  }
}

/** Elements of the embeddings of each type. */
const EMBEDDING_ARRAYS = { unspecified: Float32Array, float: Float32Array, int8: Int8Array, uint8: Uint8Array, binary: Int8Array, ubinary: Uint8Array };

function listOf<T>(values: T | T[]): T[] {
  return Array.isArray(values) ? values : [values];
}
