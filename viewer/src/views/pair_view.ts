// Comparison of two texts: the scores of their tokens and the matrix of token pairs.
import { Bars } from "../bars";
import { CellMap } from "../cells";
import { Chips } from "../chips";
import { signedBackground, signedByte, signedTable } from "../color";
import type { PairData, ScoresData } from "../data";
import { element, section, short } from "../dom";
import { plainText, signedText } from "../numbers";
import { signedScale } from "../scales";
import type { Actions, Frame, View } from "../state";
import { largest, summed, visibleUnits, type Unit } from "../units";

interface Side {
  chips: Chips;
  bars: Bars | null;
  units: Unit[];
}

type Position = { side: number; unit: number };

export class PairView implements View {
  readonly element: HTMLElement;
  private readonly sides: Side[];
  private readonly partners = element("p", { class: "sum" });
  private readonly scale = signedScale();
  private readonly cells: CellMap;
  private matrix: number[][] = []; // between display units
  private key = "";
  private hover: Position | null = null;
  private chosen: Position | null = null;

  constructor(
    private readonly actions: Actions,
    private readonly pair: PairData,
  ) {
    const { texts } = actions.page;
    this.sides = texts.map((text, side) => ({
      chips: new Chips(`Tokens of: ${text.label}`, {
        hover: (unit) => this.point(unit === null ? null : { side, unit }, this.chosen),
        choose: (unit) => this.point(null, { side, unit }),
      }),
      bars: text.scores.length ? new Bars(`${text.label}: ${text.scores[0].method}`) : null,
      units: [],
    }));
    const columns = this.sides.map((side, index) =>
      element("div", { class: "side" }, element("h3", {}, texts[index].label), side.chips.element, side.bars?.element ?? null),
    );
    this.cells = new CellMap(`${pair.name}: rows are the first text, columns the second`, {
      hover: (row) => this.point(row === null ? null : this.rowAt(row), this.chosen),
      choose: (row) => this.point(null, this.rowAt(row)),
    });
    const similarity = pair.similarity === null ? "" : ` Similarity ${plainText(pair.similarity)}.`;
    const caption = element("figcaption", {}, element("p", {}, totals(pair)), element("p", {}, pair.description));
    const beside = element("div", {}, this.partners, this.scale.element, caption);
    const map = element("figure", { class: "pair-map" }, this.cells.element, beside);
    this.element = section(
      "pair",
      "Both texts",
      `Point to a word to see its partners in the other text.${similarity}`,
      element("div", { class: "two" }, ...columns),
      map,
    );
  }

  draw(frame: Frame): void {
    const { level, specials } = frame.state;
    const key = `${level} ${specials} ${frame.dark}`;
    if (key === this.key) return;
    this.key = key;
    this.chosen = this.hover = null;
    const { texts } = this.actions.page;
    this.sides.forEach((side, index) => {
      side.units = visibleUnits(texts[index].tokens, level, specials);
      side.chips.show(side.units);
    });
    const [rows, columns] = this.sides.map((side) => side.units);
    this.matrix = rows.map((row) =>
      summed(
        this.pair.values[0].map((_, j) => sumRows(this.pair.values, row, j)),
        columns,
      ),
    );
    this.drawCells(frame);
    this.paint();
  }

  private point(hover: Position | null, chosen: Position | null): void {
    this.hover = hover;
    this.chosen = chosen;
    this.paint();
  }

  private paint(): void {
    const at = this.hover ?? this.chosen;
    const { texts } = this.actions.page;
    const partners = at === null ? [] : this.partnersOf(at);
    const extent = Math.max(...this.matrix.flat().map(Math.abs)) || 1;
    this.sides.forEach((side, index) => {
      if (at !== null && at.side !== index) {
        side.chips.paint(partners.map((value) => signedBackground(value / extent)), partners.map((value) => signedText(value)));
      } else {
        this.paintScores(side, texts[index].scores[0]);
      }
      side.chips.mark(this.chosen?.side === index ? this.chosen.unit : null);
      side.bars?.draw(texts[index].scores[0], side.units, at?.side === index ? at.unit : null);
    });
    this.cells.mark(at?.side === 0 ? at.unit : null, at?.side === 1 ? at.unit : null);
    this.partners.replaceChildren(...this.sentence(at, partners));
  }

  private paintScores(side: Side, scores: ScoresData | undefined): void {
    const values = scores ? summed(scores.values, side.units) : side.units.map(() => 0);
    const extent = Math.max(...values.map(Math.abs)) || 1;
    side.chips.paint(values.map((value) => signedBackground(value / extent)), values.map((value) => signedText(value)));
  }

  private partnersOf(at: Position): number[] {
    return at.side === 0 ? this.matrix[at.unit] : this.matrix.map((row) => row[at.unit]);
  }

  private sentence(at: Position | null, partners: number[]): (Node | string)[] {
    if (at === null) return ["Select a word of either text to see its partners in the other text."];
    const others = this.sides[1 - at.side].units;
    const name = element("b", {}, short(this.sides[at.side].units[at.unit].shown));
    const top = largest(partners, 3).map((index) => `${short(others[index].shown)} ${signedText(partners[index])}`);
    return [name, ` pairs most strongly with ${top.join(", ")}.`];
  }

  private rowAt(row: number): Position | null {
    return row < this.sides[0].units.length ? { side: 0, unit: row } : null;
  }

  /** Draw the matrix. Baselines are drawn in a separate row and column after a gap. */
  private drawCells({ dark, palette }: Frame): void {
    const [rows, columns] = this.sides.map((side) => side.units);
    const { baselineRow, baselineColumn, baseline } = this.pair;
    const labels = this.sides.map((side) => side.units.map((unit) => ({ text: unit.shown, muted: unit.special })));
    const values: (number | null)[][] = this.matrix.map((row) => [...row]);
    if (baselineRow || baselineColumn) {
      const column = summed(baselineColumn ?? this.pair.values.map(() => 0), rows);
      const row = summed(baselineRow ?? this.pair.values[0].map(() => 0), columns);
      values.forEach((cells, index) => cells.push(null, column[index]));
      values.push([...columns.map(() => null), null, null], [...row, null, baseline]);
      for (const side of labels) side.push({ text: "", muted: true }, { text: "baseline", muted: true });
    }
    const numbers = values.flat().filter((value) => value !== null);
    const extent = Math.max(...numbers.map(Math.abs)) || 1;
    const table = signedTable(dark);
    const pixels = Uint32Array.from(values.flat(), (value) => (value === null ? 0 : table[signedByte(value, extent)]));
    this.cells.show(labels[0], labels[1], pixels, palette);
    this.scale.draw(extent, dark);
  }
}

function sumRows(values: number[][], row: Unit, column: number): number {
  let sum = 0;
  for (let i = row.first; i < row.end; i++) sum += values[i][column];
  return sum;
}

/** Describe the sum of the matrix and its baselines. */
function totals(pair: PairData): string {
  const sum = (values: number[] | null): number => (values ?? []).reduce((total, value) => total + value, 0);
  const tokens = sum(pair.values.map(sum));
  const baseline = sum(pair.baselineRow) + sum(pair.baselineColumn) + pair.baseline;
  const parts = `${pair.name}, rows: first text, columns: second text. All tokens ${plainText(tokens)}`;
  const rest = pair.baselineRow || pair.baselineColumn || pair.baseline ? `, baseline row and column ${signedText(baseline)}` : "";
  if (!rest && pair.similarity !== null) return `${pair.name}, rows: first text, columns: second text. They add up to ${plainText(tokens)}.`;
  return pair.similarity === null ? `${parts}${rest}.` : `${parts}${rest} = ${plainText(tokens + baseline)}.`;
}
