// Explanations of logits as the server returns them: their tokens for display, their values and their sums.
import type { ExplainResult } from "../../client/typescript/src/client";
import type { ScoresData, TokenData } from "./data";
import { plainText } from "./numbers";
import { unitsOf, type Level, type Unit } from "./units";

type Explanation = ExplainResult["results"][number];
type Token = Explanation["tokens"][number];

/** Texts of an input by the source of their tokens. */
export type SourceTexts = Record<string, string>;

const WEAK_CORRELATION = 0.7;

/** Contributions to a logit, or to the difference of two logits. */
export class Contributions {
  readonly values: number[];
  readonly sums: [string, number][]; // by source, those of absent sources left out
  readonly total: number;
  readonly faithfulness: number | null;
  private readonly tokens: TokenData[];
  private readonly sources: string[];

  /** `names` are the names of the sources in sums. */
  constructor(explanation: Explanation, texts: SourceTexts, names: SourceTexts) {
    const [scores] = explanation.scores;
    this.values = Array.from(scores.values?.data ?? []);
    this.tokens = viewedTokens(explanation.tokens, texts);
    this.sources = explanation.tokens.map((token) => token.source);
    const { text, second_text, prompt, special_tokens, baseline } = explanation.sums_by_source ?? {};
    const sums: [string, number | null | undefined][] = [
      ["prompt", prompt],
      ["text", text],
      ["second_text", second_text],
      ["special", special_tokens],
      ["baseline", baseline],
    ];
    const present = new Set(["baseline", ...this.sources]);
    this.sums = sums.filter(([source]) => present.has(source)).map(([source, sum]) => [names[source], sum ?? 0]);
    this.total = scores.sum ?? 0;
    this.faithfulness = scores.faithfulness ?? null;
  }

  /** Return the words or tokens of the given sources. */
  units(level: Level, ...sources: string[]): Unit[] {
    return unitsOf(this.tokens, level).filter((unit) => sources.includes(this.sources[unit.first]));
  }

  /** Return the number of tokens that the model received. */
  get numTokens(): number {
    return this.tokens.length;
  }

  /** Return a sentence on the method and on how well it was found to work. */
  about(): string {
    const method = "Contributions: exact decomposition of the logit with the attention weights held constant.";
    if (this.faithfulness === null) return `${method} Agreement with leave-one-out scores was not measured for this question.`;
    const correlation = `Spearman ${plainText(this.faithfulness, 2)}`;
    const measured = `Agreement of the tokens' scores with leave-one-out scores: ${correlation}, measured on other texts when the model was exported.`;
    const warning = this.faithfulness < WEAK_CORRELATION ? " It is low: these scores are a weak guide to which words matter." : "";
    return `${method} ${measured}${warning}`;
  }
}

/** Return scores for `Bars` of a list of names and values. */
export function barsOf(entries: [string, number][], target: string): { scores: ScoresData; units: Unit[] } {
  const values = entries.map(([, value]) => value);
  const units = entries.map(([shown], index) => ({ first: index, end: index + 1, shown, spelling: shown, special: false, joined: false }));
  return { scores: scoresOf(values, target), units };
}

/** Return scores for `Bars` whose sum is the total of all values. */
export function scoresOf(values: number[], target: string, baseline: number | null = null): ScoresData {
  const sum = values.reduce((total, value) => total + value, baseline ?? 0);
  return { method: "contributions", target, values, baseline, sum, expectedSum: null, rho: null, description: "" };
}

// Like `viewed_tokens` in attnlens_viewer/tokens.py.
function viewedTokens(tokens: Token[], texts: SourceTexts): TokenData[] {
  const characters = new Map(Object.entries(texts).map(([source, text]) => [source, Array.from(text)])); // code points, like offsets
  let word = -1;
  return tokens.map((token, index) => {
    const previous: Token | undefined = tokens[index - 1];
    const text = characters.get(token.source) ?? [];
    const isSpecial = token.source === "special";
    const follows = !isSpecial && previous?.source === token.source;
    if (!(follows && token.word_index !== undefined && previous.word_index === token.word_index)) word += 1;
    const span = text.slice(token.char_start, token.char_end).join("").trim();
    const isRepeated = follows && previous.char_start === token.char_start && previous.char_end === token.char_end;
    const between = follows ? text.slice(Math.min(previous.char_end, token.char_start), token.char_start) : [" "];
    const startsWithSpace = /^\s/u.test(text[token.char_start] ?? "");
    return {
      text: token.text,
      shown: span && !isRepeated && !isSpecial ? span : token.text,
      word,
      special: isSpecial,
      joined: between.length === 0 && !startsWithSpace,
    };
  });
}
