// Types of the page data that attnlens_viewer/page_json.py writes.

export interface TokenData {
  text: string;
  word: number;
  shown?: string;
  special?: boolean;
  joined?: boolean;
}

export interface ScoresData {
  method: string;
  target: string;
  values: number[];
  baseline: number | null;
  sum: number | null;
  expectedSum: number | null;
  rho: number | null;
  description: string;
}

export interface TextData {
  label: string;
  tokens: TokenData[];
  layers: number;
  heads: number;
  scores: ScoresData[];
  headContributions: number[][] | null;
  tokensTotal: number | null;
  start: { layer: number; head: number; row: number };
}

export interface PairData {
  name: string;
  values: number[][];
  baselineRow: number[] | null;
  baselineColumn: number[] | null;
  baseline: number;
  similarity: number | null;
  description: string;
}

export interface ContrastData {
  to: string;
  ratherThan: string;
  scores: ScoresData;
}

export interface PageData {
  version: number;
  title: string;
  model: string;
  kept: number | null;
  reason: "" | "requested" | "size";
  texts: TextData[];
  pair: PairData | null;
  contrast: ContrastData | null;
  labels: { layer: number; head: number; labels: string[] }[];
  notes: string[];
}

/** Return the labels of a head. */
export function labelsOf(page: PageData, layer: number, head: number): string[] {
  return page.labels.find((entry) => entry.layer === layer && entry.head === head)?.labels ?? [];
}
