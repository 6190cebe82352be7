// Compiled, not run: each call has the documented types.
import { AttnlensClient, AttnlensError, OverloadedError, Tensor, type TypedArray } from "../../client/typescript/lib/index.js";

const client = new AttnlensClient({ baseUrl: "http://127.0.0.1:8080", apiKey: "key", timeoutMs: 1000, maxRetries: 0 });
const { signal } = new AbortController();

const { embeddings, usages, model } = await client.embed("a", { pooling: "mean", signal });
export const rows: Float32Array[] = embeddings;
export const numbers: [number, string] = [usages[0].num_tokens, model];
const quantized = await client.embed(["a"], { embedding_type: "int8", ranges: new Tensor([2, 1], Float32Array.of(0, 1)) });
export const levels: TypedArray[] = quantized.embeddings;
// @ts-expect-error -- quantized embeddings are not Float32Array
export const wrong: Float32Array[] = quantized.embeddings;

const { results } = await client.attention([{ text_pair: { first: "a", second: "b" } }], { attention: [{ view: "head_mean" }] });
export const weights: Tensor | undefined = results[0].attention[0].dense;
export const layers: number[] = results[0].attention[0].layers;
export const explained: Tensor | undefined = (await client.explain("a", { direction: embeddings[0] })).results[0].scores[0].values;
export const similarity: number | null = (await client.compare({ a: "a", b: "b" }, { matrix: "output" })).results[0].similarity;
export const id: number = (await client.tokenize("a")).results[0].tokens[0].id;
export const names: string[] = (await client.models({ signal })).map(({ name }) => name);
export const parts: (number | Tensor)[] = [...new Tensor([1], embeddings[0])];
for await (const { attention, input_index } of client.encodeStream("a", { signal })) {
  export_(attention?.dense?.at(0, -1).data, input_index);
}

// @ts-expect-error -- unknown option
await client.embed("a", { poolin: "mean" });
// @ts-expect-error -- unknown pooling
await client.embed("a", { pooling: "median" });
// @ts-expect-error -- tokenize returns no arrays, and the client selects their format
await client.encode("a", { arrays: "lists" });

function export_(..._: unknown[]): void {}

export function describe(error: unknown): string {
  if (error instanceof OverloadedError) return `try again in ${error.retryAfterMs} ms`;
  return error instanceof AttnlensError ? `${error.status} ${error.reason}: ${error.violations.length}` : "";
}
