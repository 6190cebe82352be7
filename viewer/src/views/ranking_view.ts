// The documents of a reranker by descending score, the contributions of their words, and why one ranks above another.
import { Bars } from "../bars";
import { Selector } from "../controls";
import { Choices, element, section, short } from "../dom";
import { counted, plainText, signedText } from "../numbers";
import { signedScale } from "../scales";
import { barsOf, type Contributions } from "../tokens";
import { summed, type Level } from "../units";
import { extentOf, ScoredWords } from "./scored_words";
import { termsOf } from "./text_view";

export interface RankedDocument {
  index: number; // in the form
  text: string;
  score: number;
  logit: number;
  tokensTotal: number | null; // before truncation, or null
  contributions: Contributions | null;
}

export interface Ranking {
  model: string;
  query: string;
  documents: RankedDocument[]; // by descending logit
  numDocuments: number; // including those that are not shown
  activation: string;
}

/** Ranks of two documents, counted from 0. */
export interface Compared {
  first: number;
  second: number;
}

const QUERY = ["prompt", "text"];
const LEVELS: [Level, string][] = [["words", "Words"], ["tokens", "Tokens"]];
const NOTES = [
  "The score is a function of the logit. It is not a probability unless the model was calibrated, and a document with " +
    "twice the score is not twice as relevant.",
  "The score of a document does not depend on the other documents.",
];
const NOTES_ON_CONTRIBUTIONS = [
  "Contributions explain the logit, not whether the document is relevant.",
  "The baseline comes from the biases of the model and belongs to no word. If it is large, the words explain less of the logit.",
];

const NOTE_ON_DIFFERENCE = "For the difference of two documents, agreement with leave-one-out scores was not measured.";

export class RankingView {
  private readonly items: Item[];
  private readonly comparison: ComparisonPart | null = null;
  private readonly levels: Choices<Level>;
  private readonly scale = signedScale();
  private readonly darkScheme = window.matchMedia("(prefers-color-scheme: dark)");
  private extent = 0;
  private readonly drawScale = (): void => this.scale.draw(this.extent, this.darkScheme.matches);

  constructor(root: HTMLElement, ranking: Ranking, start: Compared, changed: (compared: Compared) => void) {
    const { documents } = ranking;
    const explains = documents.some((document) => document.contributions !== null);
    this.levels = new Choices("Words or tokens", LEVELS, (level) => this.draw(level));
    this.items = documents.map((document, rank) => new Item(document, rank));
    const list = element("ol", { class: "ranking" }, ...this.items.map((item) => item.element));
    const lead = explains ? "Blue words raise the logit, orange words lower it. Select a word to see its contribution." : null;
    const parts = [section("ranked-documents", "Documents", lead, explains ? this.scale.element : null, list)];
    if (explains && documents.length > 1) {
      this.comparison = new ComparisonPart(documents, start, changed);
      parts.push(this.comparison.element);
    }
    const shown = documents.flatMap((document) => document.contributions ?? []);
    const about = (shown.find((contributions) => contributions.faithfulness === null) ?? shown[0])?.about();
    const notes = [...NOTES, ...(about ? [...NOTES_ON_CONTRIBUTIONS, about] : []), ...(this.comparison ? [NOTE_ON_DIFFERENCE] : [])];
    const caveats = element("ul", {}, ...notes.map((text) => element("li", {}, text)));
    root.classList.add("attnlens");
    parts.push(section("notes", "What this does not mean", null, caveats));
    root.replaceChildren(header(ranking, explains ? this.levels.element : null), ...parts);
    this.draw("words");
    this.darkScheme.addEventListener("change", this.drawScale);
  }

  close(): void {
    this.darkScheme.removeEventListener("change", this.drawScale);
  }

  private draw(level: Level): void {
    this.levels.show(level);
    this.extent = Math.max(...this.items.map((item) => item.extent(level)));
    for (const item of this.items) item.draw(level, this.extent);
    this.comparison?.draw(level);
    this.drawScale();
  }
}

function header({ model, query, documents, numDocuments, activation }: Ranking, levels: HTMLElement | null): HTMLElement {
  const count = counted(numDocuments, "document");
  const shown = documents.length === numDocuments ? count : `the first ${documents.length} of ${count}`;
  const scores = activation === "identity" ? "the score is the logit" : `the score is the ${activation} of the logit`;
  const title = element("h2", { class: "title", dir: "auto" }, query);
  const facts = element("p", { class: "facts" }, [model, shown, scores].join(" · "));
  return element("header", { class: "top" }, element("div", {}, title, facts), levels);
}

/** A document of the list. */
class Item {
  readonly element: HTMLElement;
  private readonly readOut = element("p", { class: "about" });
  private readonly words: ScoredWords;
  private readonly queryWords: ScoredWords;

  constructor(
    private readonly document: RankedDocument,
    rank: number,
  ) {
    const { index, text, score, logit, contributions, tokensTotal } = document;
    const name = `Document ${index + 1}`;
    const tokens = contributions ? `${counted(contributions.numTokens, "token")} with the query. ` : "";
    const truncated = tokensTotal === null ? "" : `The document was truncated: with the query, it has ${tokensTotal} tokens.`;
    const usual = `${tokens}${truncated}`;
    this.words = new ScoredWords(`Words of document ${index + 1}`, this.readOut, usual);
    this.queryWords = new ScoredWords(`Words of the query, with document ${index + 1}`, this.readOut, usual);
    const details = contributions
      ? [
          this.words.element,
          element("div", { class: "with-query" }, element("span", { class: "label" }, "Query"), this.queryWords.element),
          element("p", { class: "sum" }, ...termsOf(contributions.sums, contributions.total, "the logit")),
        ]
      : [element("p", { class: "document", dir: "auto" }, text)];
    this.element = element(
      "li",
      {},
      element(
        "div",
        { class: "ranked-head" },
        element("h3", {}, `${rank + 1}. ${name}`),
        element("p", { class: "sum" }, "score ", element("b", {}, plainText(score, 4)), ", logit ", element("b", {}, plainText(logit))),
      ),
      ...details,
      this.readOut,
    );
  }

  /** Return the largest contribution of a word of the document or of the query. */
  extent(level: Level): number {
    const { contributions } = this.document;
    return contributions ? extentOf([{ units: contributions.units(level, "second_text", ...QUERY), values: contributions.values }]) : 0;
  }

  draw(level: Level, extent: number): void {
    const { contributions } = this.document;
    if (!contributions) return;
    this.words.draw(contributions.units(level, "second_text"), contributions.values, extent);
    this.queryWords.draw(contributions.units(level, ...QUERY), contributions.values, extent);
  }
}

/** Why one document ranks above another. */
class ComparisonPart {
  readonly element: HTMLElement;
  private readonly lead = element("span", { role: "status" });
  private readonly sourceBars = new Bars("Difference by source");
  private readonly wordBars = new Bars("Difference by word of the query");
  private readonly words: ScoredWords;
  private readonly selectors: Record<keyof Compared, Selector>;
  private level: Level = "words";
  private redrawWords: (highlighted: number | null) => void = () => undefined;

  constructor(
    private readonly documents: RankedDocument[],
    private compared: Compared,
    private readonly changed: (compared: Compared) => void,
  ) {
    const options = documents.map(({ index, text }, rank): [number, string] => {
      return [rank, `${rank + 1}. Document ${index + 1}: ${short(text, 60)}`];
    });
    this.selectors = {
      first: new Selector("Document", options, (rank) => this.choose({ first: rank })),
      second: new Selector("Compared with", options, (rank) => this.choose({ second: rank })),
    };
    const readOut = element("p", { class: "about" });
    const usual = "Blue words of the query contribute more to the first document, orange words to the second.";
    this.words = new ScoredWords("Words of the query, scored by difference", readOut, usual, (index) => this.redrawWords(index));
    this.element = section(
      "contrast",
      "Why one document ranks above another",
      this.lead,
      element("div", { class: "bar" }, this.selectors.first.element, this.selectors.second.element),
      element(
        "div",
        { class: "two" },
        element("div", {}, this.sourceBars.element),
        element("div", {}, this.words.element, readOut, this.wordBars.element),
      ),
    );
  }

  /** Select a document. If it is the other one already, exchange both. */
  private choose(part: Partial<Compared>): void {
    const { first, second } = this.compared;
    const next = { first, second, ...part };
    if (next.first === next.second) this.compared = { first: second, second: first };
    else this.compared = next;
    this.changed(this.compared);
    this.draw(this.level);
  }

  draw(level: Level): void {
    this.level = level;
    const { first, second } = this.compared;
    this.selectors.first.show(first);
    this.selectors.second.show(second);
    const [a, b] = [this.documents[first], this.documents[second]];
    if (!a.contributions || !b.contributions) return;
    const total = a.contributions.total - b.contributions.total;
    const difference = `${plainText(Math.abs(total))} ${total < 0 ? "lower" : "higher"}`;
    const names = [a, b].map(({ index }) => `document ${index + 1}`);
    this.lead.replaceChildren(`The logit of ${names[0]} is `, element("b", {}, difference), ` than that of ${names[1]}.`);
    const sources = barsOf(differences(a.contributions.sums, b.contributions.sums), "the difference of both logits");
    this.sourceBars.draw(sources.scores, sources.units, null);
    this.drawWords(a.contributions, b.contributions, names);
  }

  private drawWords(a: Contributions, b: Contributions, names: string[]): void {
    const original = a.units(this.level, ...QUERY);
    const [inFirst, inSecond] = [summed(a.values, original), summed(b.values, b.units(this.level, ...QUERY))];
    const units = original.map((unit, index) => ({ ...unit, first: index, end: index + 1 }));
    const { scores } = barsOf(
      units.map((unit, index) => [unit.shown, inFirst[index] - inSecond[index]]),
      "from the words of the query",
    );
    this.redrawWords = (highlighted) => this.wordBars.draw(scores, units, highlighted);
    const detail = (index: number): string =>
      ` (${signedText(inFirst[index])} for ${names[0]}, ${signedText(inSecond[index])} for ${names[1]})`;
    this.words.draw(units, scores.values, extentOf([{ units, values: scores.values }]), detail);
    this.redrawWords(null);
  }
}

/** Return the differences of the sums of each source. */
function differences(first: [string, number][], second: [string, number][]): [string, number][] {
  const [a, b] = [new Map(first), new Map(second)];
  return [...new Set([...a.keys(), ...b.keys()])].map((name) => [name, (a.get(name) ?? 0) - (b.get(name) ?? 0)]);
}
