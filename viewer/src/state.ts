// The state of the page, the frame that views draw, and the interfaces between views and the application.
import type { PageData, TextData } from "./data";
import type { Scale, Table } from "./color";
import type { Palette } from "./palette";
import type { Level, Matrix, Unit } from "./units";

export interface State {
  text: number;
  layer: number;
  head: number | null; // null for the mean of all heads
  level: Level;
  specials: boolean;
  scale: Scale;
  row: number; // selected token
  hover: number | null; // token under the pointer
  column: number | null; // selected key token
}

/** The state, and everything derived from it for drawing. */
export interface Frame {
  state: State;
  text: TextData;
  units: Unit[];
  matrix: Matrix;
  row: number; // index of the unit under the pointer, or else of the selected unit
  chosen: number; // index of the selected unit
  column: number | null; // index of the selected key unit
  table: Table;
  palette: Palette;
  dark: boolean;
}

/** A part of the page. */
export interface View {
  element: HTMLElement;
  draw(frame: Frame): void;
}

/** Operations available to views. */
export interface Actions {
  page: PageData;
  state(): State;
  change(part: Partial<State>): void;
}
