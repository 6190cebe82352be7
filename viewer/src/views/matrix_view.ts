// The attention map of a head: as a heat map, as lines, and one row as numbers.
import { CellMap, type Label } from "../cells";
import { element, section } from "../dom";
import { weightScale } from "../scales";
import type { Actions, Frame, View } from "../state";
import type { Matrix, Unit } from "../units";
import { LinesView } from "./lines_view";
import { RowView } from "./row_view";

export class MatrixView implements View {
  readonly element: HTMLElement;
  private readonly cells: CellMap;
  private readonly scale = weightScale();
  private readonly lines: LinesView;
  private readonly row: RowView;
  private frame: Frame | null = null;
  private drawn: [Matrix, Frame["table"]] | null = null;
  private labeledUnits: Unit[] = [];
  private labels: Label[] = [];

  constructor(actions: Actions, controls: HTMLElement) {
    const tokenOf = (unit: number): number => (this.frame as Frame).units[unit].first;
    this.cells = new CellMap("Attention of one head: each row attends to the columns. Arrow keys move, Page Up and Page Down change the head.", {
      hover: (row, column) =>
        actions.change({ hover: row === null ? null : tokenOf(row), column: column === null ? null : tokenOf(column) }),
      choose: (row, column) => actions.change({ row: tokenOf(row), column: tokenOf(column), hover: null }),
    });
    this.cells.element.addEventListener("keydown", (event) => {
      if (event.key !== "PageDown" && event.key !== "PageUp") return;
      event.preventDefault();
      actions.change(adjacentHead(this.frame as Frame, event.key === "PageDown" ? 1 : -1));
    });
    this.lines = new LinesView(actions);
    this.row = new RowView();
    this.element = section(
      "attention",
      "Attention of one head",
      "Each row shows how much a word attends to the word of each column. A row adds up to 1.",
      controls,
      element(
        "div",
        { class: "maps" },
        element("figure", { class: "map" }, this.cells.element, this.scale.element),
        element("div", { class: "beside" }, this.row.element, this.lines.element),
      ),
    );
  }

  draw(frame: Frame): void {
    this.frame = frame;
    const { matrix, table } = frame;
    if (this.drawn?.[0] !== matrix || this.drawn[1] !== table) {
      this.drawn = [matrix, table];
      if (frame.units !== this.labeledUnits) {
        this.labeledUnits = frame.units;
        this.labels = frame.units.map((unit) => ({ text: unit.shown, muted: unit.special }));
      }
      const { values } = matrix;
      const pixels = new Uint32Array(values.length);
      for (let i = 0; i < values.length; i++) pixels[i] = table[Math.round(255 * Math.min(1, Math.sqrt(values[i])))];
      this.cells.show(this.labels, this.labels, pixels, frame.palette);
      this.scale.draw(table);
    }
    this.cells.mark(frame.row, frame.column);
    this.lines.draw(frame);
    this.row.draw(frame);
  }
}

/** Return the previous or next head. The mean of a layer counts as the position before its first head. */
function adjacentHead(frame: Frame, step: number): { layer: number; head: number | null } {
  const { layers, heads } = frame.text;
  const { layer, head } = frame.state;
  const index = (layer * heads + (head ?? (step > 0 ? -1 : 0)) + step + layers * heads) % (layers * heads);
  return { layer: Math.floor(index / heads), head: index % heads };
}
