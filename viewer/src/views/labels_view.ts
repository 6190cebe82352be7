// The labels of a classifier by descending score, and the contributions of words to the logit of a label.
import { Bars } from "../bars";
import { Selector } from "../controls";
import { Choices, element, press, section, toggle } from "../dom";
import { counted, plainText } from "../numbers";
import { signedScale } from "../scales";
import { scoresOf, type Contributions } from "../tokens";
import type { Level } from "../units";
import { extentOf, ScoredWords } from "./scored_words";
import { termsOf } from "./text_view";

export interface Classification {
  model: string;
  title: string;
  texts: [string, string][]; // source and name of each text
  labels: string[];
  scores: number[];
  logits: number[];
  activation: string;
  explain: ((selected: SelectedLabels, signal: AbortSignal) => Promise<Contributions>) | null;
}

/** Indices of labels. */
export interface SelectedLabels {
  label: number;
  ratherThan: number | null;
}

const SHOWN = 10;
const NONE = -1;
const LEVELS: [Level, string][] = [["words", "Words"], ["tokens", "Tokens"]];

export class LabelsView {
  private readonly explanation: ExplanationPart | null;
  private readonly buttons: [number, HTMLButtonElement][] = [];

  /** `messageOf` returns the message of an error. */
  constructor(
    root: HTMLElement,
    private readonly result: Classification,
    start: SelectedLabels,
    changed: (selected: SelectedLabels) => void,
    messageOf: (error: unknown) => string,
  ) {
    const { model, title, labels, activation, explain } = result;
    const show = (selected: SelectedLabels): void => {
      for (const [label, button] of this.buttons) press(button, label === selected.label);
    };
    const choose = (selected: SelectedLabels): void => {
      show(selected);
      changed(selected);
    };
    this.explanation = explain ? new ExplanationPart(result, explain, start, choose, messageOf) : null;
    const scores = activation === "identity" ? "the scores are the logits" : `the scores are the ${activation} of the logits`;
    const facts = [model, counted(labels.length, "label"), scores];
    root.classList.add("attnlens");
    const heading = [element("h2", { class: "title", dir: "auto" }, title), element("p", { class: "facts" }, facts.join(" · "))];
    root.replaceChildren(
      element("header", { class: "top" }, element("div", {}, ...heading), this.explanation?.levels.element ?? null),
      section("labels", "Labels", explain ? "Select a label to see which words contribute to it." : null, this.table()),
      ...(this.explanation ? [this.explanation.element, notes()] : []),
    );
    show(start);
    void this.explanation?.show();
  }

  close(): void {
    this.explanation?.close();
  }

  /** Create the table of the labels with the highest scores. */
  private table(): HTMLElement {
    const { labels, scores, logits, activation } = this.result;
    const order = labels.map((_, index) => index).sort((a, b) => logits[b] - logits[a] || a - b);
    const extent = activation === "identity" ? Math.max(...scores.map(Math.abs)) || 1 : 1;
    const rows = order.slice(0, SHOWN).map((index) => {
      const bar = element("i", { class: scores[index] < 0 ? "minus" : "plus" });
      bar.style.width = `${(100 * Math.abs(scores[index])) / extent}%`;
      return element(
        "tr",
        {},
        element("th", { scope: "row", dir: "auto" }, this.labelOf(index)),
        element("td", { class: "number" }, plainText(scores[index], 4)),
        element("td", { class: "number" }, plainText(logits[index])),
        element("td", { class: "gauge" }, bar),
      );
    });
    const columns = ["label", "score", "logit"].map((name) => element("th", { scope: "col" }, name));
    const others = order.length - rows.length;
    return element(
      "table",
      { class: "bars label-scores" },
      others > 0 ? element("caption", {}, `The ${SHOWN} labels with the highest scores of ${order.length}`) : null,
      element("thead", {}, element("tr", {}, ...columns, element("td"))),
      element("tbody", {}, ...rows),
    );
  }

  private labelOf(index: number): HTMLElement | string {
    const { labels } = this.result;
    if (!this.explanation) return labels[index];
    const button = toggle(labels[index], false, () => this.explanation?.choose({ label: index }));
    this.buttons.push([index, button]);
    return button;
  }
}

function notes(): HTMLElement {
  const items = [
    "Contributions explain the logit of a label, not its score, which can depend on the logits of all labels.",
    "Contributions explain the logit, not whether the label is correct.",
    "The baseline comes from the biases of the model and belongs to no word. If it is large, the words explain less of the logit.",
  ];
  return section("notes", "What this does not mean", null, element("ul", {}, ...items.map((text) => element("li", {}, text))));
}

/** The contributions to the logit of a label, or to the difference of two logits. */
class ExplanationPart {
  readonly element: HTMLElement;
  readonly levels: Choices<Level>;
  private readonly status = element("p", { class: "status", role: "status" });
  private readonly content: HTMLElement;
  private readonly words: [string, ScoredWords][];
  private readonly sum = element("p", { class: "sum" });
  private readonly about = element("p", { class: "about" });
  private readonly scale = signedScale();
  private readonly bars = new Bars("Words with the largest contributions");
  private readonly selectors: { label: Selector; ratherThan: Selector };
  private readonly darkScheme = window.matchMedia("(prefers-color-scheme: dark)");
  private readonly drawScale = (): void => this.scale.draw(this.extent, this.darkScheme.matches);
  private level: Level = "words";
  private extent = 0;
  private shown: Contributions | null = null;
  private request: AbortController | null = null;

  constructor(
    private readonly result: Classification,
    private readonly explain: NonNullable<Classification["explain"]>,
    private selected: SelectedLabels,
    private readonly changed: (selected: SelectedLabels) => void,
    private readonly messageOf: (error: unknown) => string,
  ) {
    const options = result.labels.map((label, index): [number, string] => [index, label]);
    const hasOthers = options.length > 1;
    this.selectors = {
      label: new Selector("Label", options, (label) => this.choose({ label })),
      ratherThan: new Selector("Rather than", [[NONE, "no other label"], ...options], (other) =>
        this.choose({ ratherThan: other === NONE ? null : other }),
      ),
    };
    this.levels = new Choices("Words or tokens", LEVELS, (level) => this.draw(level));
    const readOuts = result.texts.map(() => element("p", { class: "about" }));
    this.words = result.texts.map(([source, name], text) => {
      const point = (index: number | null): void => this.highlight(source, index);
      const words = new ScoredWords(`Words of the ${name}`, readOuts[text], "Select a word to see its contribution.", point);
      words.element.dataset.source = source;
      return [source, words];
    });
    this.content = element(
      "div",
      { hidden: true },
      ...this.words.flatMap(([, words], text) => [words.element, readOuts[text]]),
      element("div", { class: "under" }, this.sum, this.scale.element),
      this.bars.element,
      this.about,
    );
    this.element = section(
      "label-reasons",
      "Why this label",
      "Blue words raise the logit, or the difference of two logits, and orange words lower it.",
      element("div", { class: "bar" }, this.selectors.label.element, hasOthers ? this.selectors.ratherThan.element : null, this.status),
      this.content,
    );
    this.darkScheme.addEventListener("change", this.drawScale);
  }

  close(): void {
    this.request?.abort();
    this.request = null;
    this.darkScheme.removeEventListener("change", this.drawScale);
  }

  /** Select labels. A label is never compared with itself. */
  choose(part: Partial<SelectedLabels>): void {
    const { label, ratherThan } = { ...this.selected, ...part };
    this.selected = { label, ratherThan: ratherThan === label ? null : ratherThan };
    this.changed(this.selected);
    void this.show();
  }

  /** Compute and draw the contributions to the selected label. */
  async show(): Promise<void> {
    this.selectors.label.show(this.selected.label);
    this.selectors.ratherThan.show(this.selected.ratherThan ?? NONE);
    this.request?.abort();
    const request = (this.request = new AbortController());
    this.setStatus("Computing…", false);
    try {
      const contributions = await this.explain(this.selected, request.signal);
      if (request !== this.request) return;
      this.shown = contributions;
      this.setStatus("", false);
      this.draw(this.level);
    } catch (error) {
      if (request !== this.request) return;
      this.shown = null;
      this.content.hidden = true; // it belongs to another label
      this.setStatus(this.messageOf(error), true);
    }
  }

  private setStatus(message: string, isError: boolean): void {
    this.status.textContent = message;
    this.status.classList.toggle("error", isError);
  }

  private draw(level: Level): void {
    this.level = level;
    this.levels.show(level);
    if (!this.shown) return;
    const { values, sums, total } = this.shown;
    this.content.hidden = false;
    const sources = this.words.map(([source, words]) => ({ words, units: this.unitsOf(source), values }));
    this.extent = extentOf(sources);
    for (const { words, units } of sources) words.draw(units, values, this.extent);
    this.sum.replaceChildren(...termsOf(sums, total, this.target()));
    this.about.textContent = this.shown.about();
    this.drawScale();
    this.highlight("", null);
  }

  private unitsOf(source: string): ReturnType<Contributions["units"]> {
    return this.shown?.units(this.level, ...(source === "text" ? ["prompt", "text"] : [source])) ?? [];
  }

  /** Draw the bars, and highlight a word. */
  private highlight(source: string, index: number | null): void {
    if (!this.shown) return;
    const units = this.words.flatMap(([each]) => this.unitsOf(each));
    const offset = source === "second_text" ? this.unitsOf("text").length : 0;
    const baseline = this.shown.sums.find(([name]) => name === "baseline")?.[1] ?? 0;
    this.bars.draw(scoresOf(this.shown.values, this.target(), baseline), units, index === null ? null : offset + index);
  }

  private target(): string {
    const { labels } = this.result;
    const { label, ratherThan } = this.selected;
    const logit = `the logit of ${labels[label]}`;
    return ratherThan === null ? logit : `${logit} minus that of ${labels[ratherThan]}`;
  }
}
