// A heat map with labels: a canvas with one pixel per cell, scaled up by the browser, and an overlay canvas.
import type { Palette } from "./palette";
import { element, isRightToLeft, short, sized } from "./dom";

export interface CellEvents {
  hover(row: number | null, column: number | null): void;
  choose(row: number, column: number): void;
}

export interface Label {
  text: string;
  muted: boolean;
}

const MAX_CELL = 34;
const MAX_HEIGHT = 560;
const LABEL_SIZE = { rows: 12, columns: 16 }; // CSS pixels per label
const SLANT = Math.PI / 3.4;
const MAX_CHARS = 14;

export class CellMap {
  readonly element: HTMLElement;
  private readonly cells = element("canvas", { class: "cells", "aria-hidden": "true" });
  private readonly over = element("canvas", { class: "over", "aria-hidden": "true" });
  private rows: Label[] = [];
  private columns: Label[] = [];
  private cell = 1;
  private left = 0;
  private top = 0;
  private row: number | null = null;
  private column: number | null = null;
  private width = 0;
  private palette: Palette | null = null;

  constructor(label: string, events: CellEvents) {
    const attributes = { class: "cell-map", role: "application", tabindex: 0, "aria-label": label };
    this.element = element("div", attributes, this.cells, this.over);
    this.cells.addEventListener("pointermove", (event) => {
      const [row, column] = this.cellAt(event);
      events.hover(row, column);
    });
    this.cells.addEventListener("pointerleave", () => events.hover(null, null));
    this.cells.addEventListener("click", (event) => events.choose(...this.cellAt(event)));
    this.element.addEventListener("keydown", (event) => this.onKey(event, events));
    new ResizeObserver(() => {
      if (Math.abs(this.element.clientWidth - this.width) > 1) this.arrange();
    }).observe(this.element);
  }

  /** Show a matrix with the given pixels in row-major order. */
  show(rows: Label[], columns: Label[], pixels: Uint32Array, palette: Palette): void {
    const same = rows === this.rows && columns === this.columns;
    this.palette = palette;
    this.rows = rows;
    this.columns = columns;
    this.cells.width = columns.length;
    this.cells.height = rows.length;
    const context = this.cells.getContext("2d") as CanvasRenderingContext2D;
    const image = context.createImageData(columns.length, rows.length);
    new Uint32Array(image.data.buffer).set(pixels);
    context.putImageData(image, 0, 0);
    if (!same) this.arrange();
  }

  /** Highlight a row and a column. */
  mark(row: number | null, column: number | null): void {
    this.row = row;
    this.column = column;
    this.drawOverlay();
  }

  private arrange(): void {
    this.width = this.element.clientWidth;
    if (!this.width || !this.rows.length || !this.palette) return;
    const context = this.font(this.over.getContext("2d") as CanvasRenderingContext2D);
    const widest = (labels: Label[]): number =>
      Math.max(...labels.map((label) => context.measureText(short(label.text, MAX_CHARS)).width));
    this.left = Math.ceil(widest(this.rows)) + 10;
    const slanted = widest(this.columns);
    this.top = Math.ceil(slanted * Math.sin(SLANT)) + 14;
    const right = Math.ceil(slanted * Math.cos(SLANT));
    const available = Math.max(40, this.width - this.left - 2);
    this.cell = Math.min(
      MAX_CELL,
      MAX_HEIGHT / this.rows.length,
      available / this.columns.length,
      Math.max((available - right) / this.columns.length, 8),
    );
    const [width, height] = [this.cell * this.columns.length, this.cell * this.rows.length];
    Object.assign(this.cells.style, {
      left: `${this.left}px`,
      top: `${this.top}px`,
      width: `${width}px`,
      height: `${height}px`,
    });
    this.element.style.height = `${Math.ceil(this.top + height + 2)}px`;
    this.drawOverlay();
  }

  private font(context: CanvasRenderingContext2D): CanvasRenderingContext2D {
    context.font = `11.5px ${this.palette?.family}`;
    return context;
  }

  private drawOverlay(): void {
    if (!this.width || !this.rows.length || !this.palette) return;
    const height = this.top + this.cell * this.rows.length + 2;
    const context = this.font(sized(this.over, this.width, height));
    const colors = this.palette;
    context.textBaseline = "middle";
    this.rows.forEach((label, index) => {
      if (!this.isLabeled(index, this.row, LABEL_SIZE.rows)) return;
      const y = this.top + this.cell * (index + 0.5);
      this.write(context, label, this.left - 7, y, 0, index === this.row, colors);
    });
    this.columns.forEach((label, index) => {
      if (!this.isLabeled(index, this.column, LABEL_SIZE.columns)) return;
      const x = this.left + this.cell * (index + 0.5);
      this.write(context, label, x, this.top - 7, -SLANT, index === this.column, colors);
    });
    const [width, cells] = [this.cell * this.columns.length, this.cell * this.rows.length];
    const thick = Math.max(this.cell, 3);
    const bands: [number, number, number, number][] = [];
    if (this.row !== null) bands.push([this.left - 1, this.top + this.cell * (this.row + 0.5) - thick / 2 - 1, width + 2, thick + 2]);
    if (this.column !== null) bands.push([this.left + this.cell * (this.column + 0.5) - thick / 2 - 1, this.top - 1, thick + 2, cells + 2]);
    for (const [line, color] of [[3.5, "rgb(0 0 0 / 0.55)"], [1.75, "#fff"]] as [number, string][]) {
      context.lineWidth = line;
      context.strokeStyle = color;
      for (const band of bands) context.strokeRect(...band);
    }
  }

  /** Return whether to draw a label: if space is limited, only every k-th and the highlighted one. */
  private isLabeled(index: number, marked: number | null, size: number): boolean {
    if (index === marked) return true;
    const step = Math.ceil(size / this.cell);
    const near = marked !== null && Math.abs(index - marked) * this.cell < size;
    return index % step === 0 && !near;
  }

  private write(
    context: CanvasRenderingContext2D,
    label: Label,
    x: number,
    y: number,
    angle: number,
    strong: boolean,
    colors: Palette,
  ): void {
    context.save();
    context.translate(x, y);
    context.rotate(angle);
    context.direction = isRightToLeft(label.text) ? "rtl" : "ltr";
    context.textAlign = angle ? "left" : "right";
    context.fillStyle = strong ? colors.accent : label.muted ? colors.muted : colors.ink;
    if (strong) context.font = `600 ${context.font}`;
    context.fillText(short(label.text, MAX_CHARS), 0, 0);
    context.restore();
  }

  private cellAt(event: MouseEvent): [number, number] {
    const box = this.cells.getBoundingClientRect();
    const indexAt = (offset: number, length: number, count: number): number =>
      Math.max(0, Math.min(count - 1, Math.floor((offset / length) * count)));
    return [
      indexAt(event.clientY - box.top, box.height, this.rows.length),
      indexAt(event.clientX - box.left, box.width, this.columns.length),
    ];
  }

  private onKey(event: KeyboardEvent, events: CellEvents): void {
    const { rows, columns } = this;
    let row = this.row ?? 0;
    let column = this.column ?? 0;
    if (event.key === "ArrowDown") row += 1;
    else if (event.key === "ArrowUp") row -= 1;
    else if (event.key === "ArrowRight") column += 1;
    else if (event.key === "ArrowLeft") column -= 1;
    else if (event.key === "Home") column = 0;
    else if (event.key === "End") column = columns.length - 1;
    else return;
    event.preventDefault();
    events.choose(Math.max(0, Math.min(rows.length - 1, row)), Math.max(0, Math.min(columns.length - 1, column)));
  }
}
