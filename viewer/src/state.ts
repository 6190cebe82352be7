// What the reader has chosen, and what every view draws of it.
import type { PageData, TextData } from "./data";
import type { Scale, Table } from "./colour";
import type { Palette } from "./palette";
import type { Level, Matrix, Unit } from "./units";

export interface State {
  text: number;
  layer: number;
  head: number | null; // null: the mean of all
  level: Level;
  specials: boolean;
  scale: Scale;
  row: number; // a token: whose row is read out
  hover: number | null; // a token: the one under the pointer
  column: number | null; // a token
}

/** One picture: the state, and what follows from it. */
export interface Frame {
  state: State;
  text: TextData;
  units: Unit[];
  matrix: Matrix;
  row: number; // of `units`: the one under the pointer, else the chosen one
  chosen: number; // of `units`
  column: number | null; // of `units`
  table: Table;
  palette: Palette;
  dark: boolean;
}

/** A part of the page. */
export interface View {
  element: HTMLElement;
  draw(frame: Frame): void;
}

/** What views may do. */
export interface Actions {
  page: PageData;
  state(): State;
  change(part: Partial<State>): void;
}
