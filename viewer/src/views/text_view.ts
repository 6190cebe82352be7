// The text with its tokens colored by the scores of a method or by the attention of the selected token.
import { Chips } from "../chips";
import { signedBackground, weightBackground } from "../color";
import type { ScoresData } from "../data";
import { Choices, element, section, short } from "../dom";
import { counted, plainText, signedText, weightText } from "../numbers";
import { signedScale } from "../scales";
import type { Actions, Frame, View } from "../state";
import { summed } from "../units";

const ATTENTION = -1;

export class TextView implements View {
  readonly element: HTMLElement;
  private readonly chips: Chips;
  private readonly bar = element("div", { class: "bar" });
  private readonly methods = element("div", { class: "slot" });
  private readonly sum = element("p", { class: "sum" });
  private readonly about = element("p", { class: "about" });
  private readonly scale = signedScale();
  private readonly texts: Choices<number> | null = null;
  private readonly hasPair: boolean;
  private choices: Choices<number> | null = null;
  private shownText = -1;
  private method = ATTENTION;
  private painted = ""; // key of the painted scores
  private frame: Frame | null = null;

  constructor(actions: Actions) {
    this.chips = new Chips("Tokens of the text", {
      hover: (index) => actions.change({ hover: this.tokenAt(index) }),
      choose: (index) => actions.change({ row: this.tokenAt(index) ?? 0, hover: null }),
    });
    const { texts } = actions.page;
    this.hasPair = actions.page.pair !== null;
    if (texts.length > 1) {
      const choices = texts.map((text, number): [number, string] => [number, text.label]);
      this.texts = new Choices("Text", choices, (text) =>
        actions.change({ text, row: texts[text].start.row, hover: null, column: null }),
      );
    }
    if (this.texts) this.bar.append(this.texts.element);
    this.bar.append(this.methods);
    this.element = section(
      "text",
      "Text",
      null,
      this.bar,
      this.chips.element,
      element("div", { class: "under" }, this.sum, this.scale.element),
      this.about,
    );
  }

  draw(frame: Frame): void {
    this.frame = frame;
    if (frame.state.text !== this.shownText) this.updateMethods(frame);
    this.texts?.show(frame.state.text);
    this.choices?.show(this.method);
    this.chips.show(frame.units);
    this.chips.mark(frame.chosen);
    const scores = frame.text.scores[this.method];
    if (scores) this.paintScores(frame, scores);
    else this.paintAttention(frame);
    // The section "Both texts" shows the words with these scores.
    const isShownBelow = frame.text.scores.length > 0 && this.hasPair && this.method === 0;
    this.chips.element.hidden = isShownBelow;
    this.scale.element.hidden = !scores || isShownBelow;
  }

  private tokenAt(index: number | null): number | null {
    return index === null || !this.frame ? null : this.frame.units[index].first;
  }

  private updateMethods(frame: Frame): void {
    this.shownText = frame.state.text;
    const { scores } = frame.text;
    this.method = scores.length ? 0 : ATTENTION;
    this.methods.replaceChildren();
    this.bar.hidden = !scores.length && !this.texts;
    if (!scores.length) return;
    const methods = scores.map((entry, index): [number, string] => [index, entry.method]);
    this.choices = new Choices("Color by", [...methods, [ATTENTION, "attention of a token"]], (method) => {
      this.method = method;
      if (this.frame) this.draw(this.frame);
    });
    this.methods.append(element("span", { class: "label" }, "Color by"), this.choices.element);
  }

  private paintScores(frame: Frame, scores: ScoresData): void {
    const key = [frame.state.text, this.method, frame.state.level, frame.state.specials, frame.dark].join(" ");
    if (key === this.painted) return;
    this.painted = key;
    const values = summed(scores.values, frame.units);
    const extent = Math.max(...values.map(Math.abs));
    this.chips.paint(
      values.map((value) => signedBackground(value / (extent || 1))),
      values.map((value) => signedText(value)),
    );
    this.scale.draw(extent, frame.dark);
    this.sum.replaceChildren(...sumOf(scores, frame, values));
    this.about.textContent = aboutScores(scores);
  }

  private paintAttention(frame: Frame): void {
    this.painted = "";
    const { units, row, matrix } = frame;
    const weights = Array.from(matrix.values.subarray(row * matrix.size, (row + 1) * matrix.size));
    this.chips.paint(weights.map(weightBackground), weights.map((weight) => `attention ${weightText(weight)}`), true);
    const name = element("b", {}, short(units[row].shown));
    const head = frame.state.head === null ? "the mean of all heads" : `head ${frame.state.head}`;
    this.sum.replaceChildren(name, ` attends to the shaded words: layer ${frame.state.layer}, ${head}.`);
    const { tokensTotal, tokens } = frame.text;
    this.about.textContent =
      `${counted(tokens.length, "token")}. ` +
      (tokensTotal === null ? "" : `The text was truncated from ${tokensTotal} tokens. `) +
      "Point to or select a word to see what it attends to.";
  }
}

/** Return the sum of the scores with its terms, including the baseline and hidden special tokens. */
function sumOf(scores: ScoresData, frame: Frame, values: number[]): (Node | string)[] {
  const shown = values.reduce((sum, value) => sum + value, 0);
  const hidden = scores.values.reduce((sum, value) => sum + value, 0) - shown;
  const parts: [string, number][] = [[frame.state.level, shown]];
  if (Math.abs(hidden) > 5e-4) parts.push(["special tokens", hidden]);
  if (scores.baseline !== null) parts.push(["baseline", scores.baseline]);
  return termsOf(parts, scores.sum, scores.target);
}

/** Return the terms of a sum and their total. */
export function termsOf(parts: [string, number][], sum: number | null, target: string): (Node | string)[] {
  const nodes: (Node | string)[] = [];
  parts.forEach(([name, value], index) => {
    const text = index ? signedText(value) : plainText(value);
    nodes.push(element("span", { class: "term" }, element("b", {}, text), ` ${name}`), " "); // lines break between terms
  });
  if (sum !== null) {
    nodes.push(element("span", { class: "term total" }, "=\u00a0", element("b", {}, plainText(sum)), ` ${target}`));
  }
  return nodes;
}

export function aboutScores(scores: ScoresData): string {
  const deviation = scores.expectedSum !== null && scores.sum !== null ? scores.sum - scores.expectedSum : 0;
  const gap = Math.abs(deviation) > 5e-4 ? `The sum deviates from the expected ${plainText(scores.expectedSum ?? 0)} by ${plainText(deviation)}. ` : "";
  const rho =
    scores.rho === null
      ? "Agreement with leave-one-out scores was not measured for this question."
      : `Agreement of the tokens' scores with leave-one-out scores: Spearman ${plainText(scores.rho, 2)}.`;
  return `${gap}${scores.description} ${rho}`.trim();
}
