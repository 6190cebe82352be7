// Types of the data that attnlens_viewer/walkthrough.py writes, and the arrays of each layer.
import type { TokenData } from "../data";
import { fromBase64 } from "../maps";
import type { Layer } from "./attention";

export interface LayerData {
  index: number;
  heads: number;
  keySize: number;
  valueSize: number;
  scale: number;
  isRotated: boolean;
  hasBias: boolean;
  hasTerms: boolean; // biases or masked positions
}

export interface WalkthroughData {
  version: number;
  text: string;
  model: string;
  hiddenSize: number;
  tokens: TokenData[];
  ids: number[];
  layers: LayerData[];
  omitted: { layer: number; mechanism: string }[];
  start: { layer: number; head: number; token: number };
}

/** Decode the float32 arrays of a layer from base64. */
export function decodeLayer(data: LayerData, tokens: number, base64: string): Layer {
  const bytes = fromBase64(base64);
  let offset = 0;
  const next = (size: number): Float32Array => {
    const array = new Float32Array(bytes.buffer, bytes.byteOffset + 4 * offset, data.heads * tokens * size);
    offset += array.length;
    return array;
  };
  const { heads, keySize, valueSize, scale } = data;
  const [query, key, value, weights] = [keySize, keySize, valueSize, tokens].map(next);
  return { heads, keySize, valueSize, scale, query, key, value, weights, bias: data.hasTerms ? next(tokens) : null };
}
