// The text: its tokens coloured by a method's scores, or by what the chosen token attends to.
import { Chips } from "../chips";
import { signedBackground, weightBackground } from "../colour";
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
  private choices: Choices<number> | null = null;
  private shownText = -1;
  private method = ATTENTION;
  private painted = ""; // which scores the tokens have as backgrounds
  private frame: Frame | null = null;

  constructor(actions: Actions) {
    this.chips = new Chips("Tokens of the text", {
      hover: (place) => actions.change({ hover: this.tokenAt(place) }),
      choose: (place) => actions.change({ row: this.tokenAt(place) ?? 0, hover: null }),
    });
    const { texts } = actions.page;
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
    if (frame.state.text !== this.shownText) this.offerMethods(frame);
    this.texts?.show(frame.state.text);
    this.choices?.show(this.method);
    this.chips.show(frame.units);
    this.chips.mark(frame.chosen);
    const scores = frame.text.scores[this.method];
    if (scores) this.paintScores(frame, scores);
    else this.paintAttention(frame);
    this.scale.element.hidden = !scores;
  }

  private tokenAt(place: number | null): number | null {
    return place === null || !this.frame ? null : this.frame.units[place].first;
  }

  private offerMethods(frame: Frame): void {
    this.shownText = frame.state.text;
    const { scores } = frame.text;
    this.method = scores.length ? 0 : ATTENTION;
    this.methods.replaceChildren();
    this.bar.hidden = !scores.length && !this.texts;
    if (!scores.length) return;
    const offered = scores.map((entry, place): [number, string] => [place, entry.method]);
    this.choices = new Choices("Colour by", [...offered, [ATTENTION, "attention of a token"]], (method) => {
      this.method = method;
      if (this.frame) this.draw(this.frame);
    });
    this.methods.append(element("span", { class: "label" }, "Colour by"), this.choices.element);
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
    this.chips.paint(weights.map(weightBackground), weights.map((weight) => `gets ${weightText(weight)}`), true);
    const name = element("b", {}, short(units[row].shown));
    const head = frame.state.head === null ? "the mean of all heads" : `head ${frame.state.head}`;
    this.sum.replaceChildren(name, ` attends to the shaded words: layer ${frame.state.layer}, ${head}.`);
    const { tokensTotal, tokens } = frame.text;
    this.about.textContent =
      `${counted(tokens.length, "token")}. ` +
      (tokensTotal === null ? "" : `The text was cut: it has ${tokensTotal} tokens. `) +
      "Point at a word, or choose one, to see where its attention goes.";
  }
}

/** What the scores add up to, with the baseline and what is hidden named. */
function sumOf(scores: ScoresData, frame: Frame, values: number[]): Node[] {
  const shown = values.reduce((sum, value) => sum + value, 0);
  const hidden = scores.values.reduce((sum, value) => sum + value, 0) - shown;
  const parts: [string, number][] = [[frame.state.level, shown]];
  if (Math.abs(hidden) > 5e-4) parts.push(["special tokens", hidden]);
  if (scores.baseline !== null) parts.push(["baseline", scores.baseline]);
  const nodes: Node[] = [];
  parts.forEach(([name, value], place) => {
    const text = place ? signedText(value) : plainText(value);
    nodes.push(element("span", { class: "term" }, element("b", {}, text), ` ${name} `));
  });
  if (scores.sum !== null) {
    nodes.push(element("span", { class: "term total" }, "= ", element("b", {}, plainText(scores.sum)), ` ${scores.target}`));
  }
  return nodes;
}

export function aboutScores(scores: ScoresData): string {
  const off = scores.expectedSum !== null && scores.sum !== null ? scores.sum - scores.expectedSum : 0;
  const gap = Math.abs(off) > 5e-4 ? `The sum misses ${plainText(scores.expectedSum ?? 0)} by ${plainText(off)}. ` : "";
  const rho =
    scores.rho === null
      ? "How well these scores agree with leaving tokens out was not measured here."
      : `Agreement with leaving tokens out: Spearman ${plainText(scores.rho, 2)}.`;
  return `${gap}${scores.description} ${rho}`.trim();
}
