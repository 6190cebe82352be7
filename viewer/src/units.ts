// Display units (words or tokens) and attention maps between them.
// The map of words averages the rows of a word's tokens and sums their columns, so rows still sum to 1.
import type { TokenData } from "./data";
import { WEIGHTS } from "./maps";

export type Level = "words" | "tokens";

/** Adjacent tokens from `first` to `end` (exclusive) that are displayed as one. */
export interface Unit {
  first: number;
  end: number;
  shown: string;
  spelling: string;
  special: boolean;
  joined: boolean;
}

/** A square attention map: `values[i * size + j]` is the weight with which unit i attends to unit j. */
export interface Matrix {
  size: number;
  values: Float32Array;
  /** Total weight of the hidden special tokens in each row. */
  hidden: Float32Array;
}

/** Selection within the maps of a layer. */
export interface Selection {
  head: number | null; // null for the mean of all heads
  level: Level;
  specials: boolean;
}

export function unitsOf(tokens: TokenData[], level: Level): Unit[] {
  const units: Unit[] = [];
  tokens.forEach((token, index) => {
    const last = units[units.length - 1];
    const shown = token.shown ?? token.text;
    if (level === "words" && last && tokens[last.first].word === token.word) {
      last.end = index + 1;
      last.shown += token.joined ? shown : ` ${shown}`;
      last.spelling += ` ${token.text}`;
    } else {
      units.push({
        first: index,
        end: index + 1,
        shown,
        spelling: token.text,
        special: token.special ?? false,
        joined: token.joined ?? false,
      });
    }
  });
  return units;
}

/** Return the visible units. Special tokens are hidden if `specials` is false, unless there is nothing else. */
export function visibleUnits(tokens: TokenData[], level: Level, specials: boolean): Unit[] {
  let cached = unitCache.get(tokens);
  if (!cached) unitCache.set(tokens, (cached = new Map()));
  const key = `${level} ${specials}`;
  const existing = cached.get(key);
  if (existing) return existing;
  const units = unitsOf(tokens, level);
  const content = units.filter((unit) => !unit.special);
  const visible = specials || content.length === 0 ? units : content;
  cached.set(key, visible);
  return visible;
}

// Identical selections return the same array, so views can detect changes by identity.
const unitCache = new WeakMap<TokenData[], Map<string, Unit[]>>();

/** Return the index of the unit that contains a token, or of the next visible unit. */
export function unitAt(units: Unit[], token: number): number {
  const index = units.findIndex((unit) => token < unit.end);
  return index < 0 ? units.length - 1 : index;
}

/** Return the selected map between the visible units from the bytes of a layer, (H, T, T). */
export function matrixOf(bytes: Uint8Array, tokens: TokenData[], selection: Selection): Matrix {
  const all = unitsOf(tokens, selection.level);
  let values = weightsOf(bytes, tokens.length, selection.head);
  if (selection.level === "words") values = betweenWords(values, tokens.length, all);
  const hidden = new Float32Array(all.length);
  const keep = all.flatMap((unit, index) => (selection.specials || !unit.special ? [index] : []));
  if (keep.length === all.length || keep.length === 0) return { size: all.length, values, hidden };
  return withoutSpecials(values, all.length, keep);
}

function weightsOf(bytes: Uint8Array, size: number, head: number | null): Float32Array {
  const area = size * size;
  const values = new Float32Array(area);
  if (head !== null) {
    const offset = head * area;
    for (let i = 0; i < area; i++) values[i] = WEIGHTS[bytes[offset + i]];
    return values;
  }
  const heads = bytes.length / area;
  for (let offset = 0; offset < bytes.length; offset += area) {
    for (let i = 0; i < area; i++) values[i] += WEIGHTS[bytes[offset + i]] / heads;
  }
  return values;
}

function betweenWords(values: Float32Array, size: number, words: Unit[]): Float32Array {
  const count = words.length;
  const wordOf = new Uint16Array(size);
  words.forEach((word, index) => wordOf.fill(index, word.first, word.end));
  const merged = new Float32Array(count * count);
  for (let row = 0; row < size; row++) {
    const word = words[wordOf[row]];
    const scale = 1 / (word.end - word.first);
    const to = wordOf[row] * count;
    for (let column = 0; column < size; column++) {
      merged[to + wordOf[column]] += scale * values[row * size + column];
    }
  }
  return merged;
}

function withoutSpecials(values: Float32Array, size: number, keep: number[]): Matrix {
  const count = keep.length;
  const kept = new Float32Array(count * count);
  const hidden = new Float32Array(count);
  keep.forEach((row, i) => {
    let total = 0;
    let sum = 0;
    for (let column = 0; column < size; column++) total += values[row * size + column];
    for (const column of keep) sum += values[row * size + column];
    hidden[i] = Math.max(0, total - sum);
    if (sum > 0) keep.forEach((column, j) => (kept[i * count + j] = values[row * size + column] / sum));
  });
  return { size: count, values: kept, hidden };
}

/** Sum token values over each unit. */
export function summed(values: number[], units: Unit[]): number[] {
  return units.map((unit) => values.slice(unit.first, unit.end).reduce((sum, value) => sum + value, 0));
}

/** Return the indices of the largest values in descending order. Ties are ordered by index. */
export function largest(values: ArrayLike<number>, count: number): number[] {
  return Array.from({ length: values.length }, (_, index) => index)
    .sort((a, b) => values[b] - values[a] || a - b)
    .slice(0, count);
}
