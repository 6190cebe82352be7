// Attention of one layer, computed from its queries, keys and values. All functions are pure.
// Shapes: T tokens, H heads, K query and key size, V value size. Arrays are flat, in C order.

export interface Layer {
  heads: number;
  keySize: number;
  valueSize: number;
  scale: number;
  query: Float32Array; // (H, T, K)
  key: Float32Array; // (H, T, K)
  value: Float32Array; // (H, T, V)
  weights: Float32Array; // (H, T, T), of the model
  bias: Float32Array | null; // (H, T, T), -Infinity at positions that the model masks
}

export type Mask = "none" | "causal" | "padding";

export interface Options {
  scaled: boolean; // with the scale of the model, or else with `otherScale`
  mask: Mask;
  padding: number; // number of tokens at the end that count as padding
  temperature: number;
}

export const MODEL_OPTIONS: Options = { scaled: true, mask: "none", padding: 1, temperature: 1 };

/** One row of attention: all values are of one query and each of the T keys. */
export interface Row {
  products: number[]; // q·k
  scaled: number[];
  bias: number[]; // -Infinity at positions that the model masks
  scores: number[]; // scaled plus bias, -Infinity at all masked positions
  weights: number[];
}

/** Return the vector of a token in a head. */
export function vectorOf(values: Float32Array, size: number, tokens: number, head: number, token: number): Float32Array {
  const start = (head * tokens + token) * size;
  return values.subarray(start, start + size);
}

export function dot(a: ArrayLike<number>, b: ArrayLike<number>): number {
  let sum = 0;
  for (let index = 0; index < a.length; index++) sum += a[index] * b[index];
  return sum;
}

export function norm(vector: ArrayLike<number>): number {
  return Math.sqrt(dot(vector, vector));
}

/** Return the scale to compare the scale of the model with: none, or 1 / sqrt(K) if the model has none. */
export function otherScale(layer: Layer): number {
  return layer.scale === 1 ? 1 / Math.sqrt(layer.keySize) : 1;
}

export function isMasked(options: Options, tokens: number, row: number, column: number): boolean {
  if (options.mask === "causal") return column > row;
  return options.mask === "padding" && column >= tokens - options.padding;
}

/** Return softmax(scores / temperature). All weights are 0 if every score is -Infinity. */
export function softmax(scores: number[], temperature = 1): number[] {
  const largest = Math.max(...scores);
  if (largest === -Infinity) return scores.map(() => 0);
  const powers = scores.map((score) => Math.exp((score - largest) / temperature));
  const sum = powers.reduce((total, power) => total + power, 0);
  return powers.map((power) => power / sum);
}

export function rowOf(layer: Layer, tokens: number, head: number, row: number, options: Options): Row {
  const query = vectorOf(layer.query, layer.keySize, tokens, head, row);
  const columns = Array.from({ length: tokens }, (_, column) => column);
  const products = columns.map((column) => dot(query, vectorOf(layer.key, layer.keySize, tokens, head, column)));
  const scale = options.scaled ? layer.scale : otherScale(layer);
  const scaled = products.map((product) => scale * product);
  const bias = columns.map((column) => (layer.bias ? layer.bias[(head * tokens + row) * tokens + column] : 0));
  const scores = columns.map((column) => (isMasked(options, tokens, row, column) ? -Infinity : scaled[column] + bias[column]));
  return { products, scaled, bias, scores, weights: softmax(scores, options.temperature) };
}

/** Return the entropy of a row in nats: 0 for a single weight, ln(n) for n equal weights. */
export function entropy(weights: number[]): number {
  return weights.reduce((sum, weight) => (weight > 0 ? sum - weight * Math.log(weight) : sum), 0);
}

/** Return the output of a head for one token: the values of all tokens, multiplied by their weights and added. */
export function outputOf(layer: Layer, tokens: number, head: number, weights: number[]): Float64Array {
  const output = new Float64Array(layer.valueSize);
  weights.forEach((weight, token) => {
    const value = vectorOf(layer.value, layer.valueSize, tokens, head, token);
    for (let index = 0; index < value.length; index++) output[index] += weight * value[index];
  });
  return output;
}

/** Return the share of each token in the output: the projection of its weighted value on the output. The sum is 1. */
export function sharesOf(layer: Layer, tokens: number, head: number, weights: number[]): number[] {
  const output = outputOf(layer, tokens, head, weights);
  const square = dot(output, output) || 1;
  return weights.map((weight, token) => (weight * dot(vectorOf(layer.value, layer.valueSize, tokens, head, token), output)) / square);
}

/** Return the largest difference between the weights computed here and those of the model, over all heads and rows. */
export function disagreement(layer: Layer, tokens: number): number {
  let largest = 0;
  for (let head = 0; head < layer.heads; head++) {
    for (let row = 0; row < tokens; row++) {
      const { weights } = rowOf(layer, tokens, head, row, MODEL_OPTIONS);
      const start = (head * tokens + row) * tokens;
      weights.forEach((weight, column) => (largest = Math.max(largest, Math.abs(weight - layer.weights[start + column]))));
    }
  }
  return largest;
}
