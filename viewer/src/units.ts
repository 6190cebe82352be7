// Words of tokens, and maps between them.
// Rows: the mean over the tokens of the word. Columns: the sum over them. So rows sum to 1 as before.
import type { TokenData } from "./data";
import { WEIGHTS } from "./maps";

export type Level = "words" | "tokens";

/** One or more tokens, from `first` to before `end`. */
export interface Unit {
  first: number;
  end: number;
  shown: string;
  spelling: string;
  special: boolean;
  joined: boolean;
}

/** A square map between units: `values[i * size + j]` is what unit i draws from unit j. */
export interface Matrix {
  size: number;
  values: Float32Array;
  /** What a row's special tokens had before they were hidden, 0 where they are shown. */
  hidden: Float32Array;
}

/** What is chosen of the maps of a layer. */
export interface Choice {
  head: number | null; // null: the mean of all
  level: Level;
  specials: boolean;
}

export function unitsOf(tokens: TokenData[], level: Level): Unit[] {
  const units: Unit[] = [];
  tokens.forEach((token, place) => {
    const last = units[units.length - 1];
    const shown = token.shown ?? token.text;
    if (level === "words" && last && tokens[last.first].word === token.word) {
      last.end = place + 1;
      last.shown += token.joined ? shown : ` ${shown}`;
      last.spelling += ` ${token.text}`;
    } else {
      units.push({
        first: place,
        end: place + 1,
        shown,
        spelling: token.text,
        special: token.special ?? false,
        joined: token.joined ?? false,
      });
    }
  });
  return units;
}

/** The units that are shown: all, or those of the text alone. Where there is nothing else, specials stay. */
export function visibleUnits(tokens: TokenData[], level: Level, specials: boolean): Unit[] {
  let made = known.get(tokens);
  if (!made) known.set(tokens, (made = new Map()));
  const key = `${level} ${specials}`;
  const found = made.get(key);
  if (found) return found;
  const units = unitsOf(tokens, level);
  const content = units.filter((unit) => !unit.special);
  const visible = specials || content.length === 0 ? units : content;
  made.set(key, visible);
  return visible;
}

// The same array for the same choice, so that views see that nothing has changed.
const known = new WeakMap<TokenData[], Map<string, Unit[]>>();

/** The place of the unit that a token is in, or of the next one where that is hidden. */
export function unitAt(units: Unit[], token: number): number {
  const place = units.findIndex((unit) => token < unit.end);
  return place < 0 ? units.length - 1 : place;
}

/** The map of `choice` between the visible units, of a layer's bytes (H, T, T). */
export function matrixOf(bytes: Uint8Array, tokens: TokenData[], choice: Choice): Matrix {
  const all = unitsOf(tokens, choice.level);
  let values = weightsOf(bytes, tokens.length, choice.head);
  if (choice.level === "words") values = betweenWords(values, tokens.length, all);
  const hidden = new Float32Array(all.length);
  const keep = all.flatMap((unit, place) => (choice.specials || !unit.special ? [place] : []));
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
  words.forEach((word, place) => wordOf.fill(place, word.first, word.end));
  const merged = new Float32Array(count * count);
  for (let row = 0; row < size; row++) {
    const word = words[wordOf[row]];
    const share = 1 / (word.end - word.first);
    const to = wordOf[row] * count;
    for (let column = 0; column < size; column++) {
      merged[to + wordOf[column]] += share * values[row * size + column];
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

/** One number a token, added up for each unit. */
export function summed(values: number[], units: Unit[]): number[] {
  return units.map((unit) => values.slice(unit.first, unit.end).reduce((sum, value) => sum + value, 0));
}

/** The places of the largest values, descending; the first ones where several are equal. */
export function largest(values: ArrayLike<number>, count: number): number[] {
  return Array.from({ length: values.length }, (_, place) => place)
    .sort((a, b) => values[b] - values[a] || a - b)
    .slice(0, count);
}
