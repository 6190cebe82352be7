// The attention map as lines between two columns of words. Only visible rows are drawn, to keep long texts fast.
import { element, isRightToLeft, short, sized } from "../dom";
import type { Actions, Frame } from "../state";

const LINE = 23; // line height in pixels
const PAD = 10;
const COLUMN_WIDTH = 0.31; // width of a word column as a share of the canvas
const MIN_WEIGHT = 0.03;
const MAX_CHARS = 16;

export class LinesView {
  readonly element: HTMLElement;
  private readonly canvas = element("canvas", { class: "lines", "aria-hidden": "true" });
  private readonly space = element("div", { class: "space" }, this.canvas);
  private readonly scroll: HTMLElement;
  private frame: Frame | null = null;
  private chosen = -1;
  private scheduled = false;

  constructor(actions: Actions) {
    const label = "The same head as lines from each word on the left to the words it attends to";
    this.scroll = element("div", { class: "lines-scroll", role: "region", tabindex: 0, "aria-label": label }, this.space);
    this.element = element("figure", { class: "line-map" }, this.scroll);
    this.scroll.addEventListener("scroll", () => this.schedule());
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "touch") actions.change({ hover: this.tokenAt(event) });
    });
    this.canvas.addEventListener("pointerleave", () => actions.change({ hover: null }));
    this.canvas.addEventListener("click", (event) => {
      const token = this.tokenAt(event);
      if (token !== null) actions.change({ row: token, hover: null });
    });
    new ResizeObserver(() => this.schedule()).observe(this.scroll);
  }

  draw(frame: Frame): void {
    this.frame = frame;
    this.space.style.height = `${frame.units.length * LINE + 2 * PAD}px`;
    if (frame.chosen !== this.chosen) {
      if (this.chosen >= 0) this.reveal(frame.chosen); // initially, keep the start of the text in view
      this.chosen = frame.chosen;
    }
    this.paint();
  }

  private schedule(): void {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.paint();
    });
  }

  private reveal(unit: number): void {
    const { scrollTop, clientHeight } = this.scroll;
    const y = PAD + unit * LINE;
    if (y < scrollTop || y + LINE > scrollTop + clientHeight) this.scroll.scrollTop = y - clientHeight / 2;
  }

  private tokenAt(event: MouseEvent): number | null {
    if (!this.frame) return null;
    const box = this.canvas.getBoundingClientRect();
    const unit = Math.floor((event.clientY - box.top + this.scroll.scrollTop - PAD) / LINE);
    const onLeft = event.clientX - box.left < box.width / 2;
    return onLeft && unit >= 0 && unit < this.frame.units.length ? this.frame.units[unit].first : null;
  }

  private paint(): void {
    const frame = this.frame;
    const { clientWidth: width, clientHeight: height, scrollTop } = this.scroll;
    if (!frame || !width || !height) return;
    const context = sized(this.canvas, width, height);
    const { ink, muted, accent, family } = frame.palette;
    const { units, matrix, row } = frame;
    const first = Math.max(0, Math.floor((scrollTop - PAD) / LINE));
    const end = Math.min(units.length, Math.ceil((scrollTop + height - PAD) / LINE));
    const y = (unit: number): number => PAD + (unit + 0.5) * LINE - scrollTop;
    const [from, to] = [width * COLUMN_WIDTH, width * (1 - COLUMN_WIDTH)];
    context.strokeStyle = accent;
    const stroke = (unit: number, factor: number): void => {
      for (let other = 0; other < matrix.size; other++) {
        const weight = matrix.values[unit * matrix.size + other];
        if (weight < MIN_WEIGHT) continue;
        context.globalAlpha = Math.min(1, weight * factor);
        context.lineWidth = 0.8 + 3.2 * weight;
        context.beginPath();
        context.moveTo(from + 6, y(unit));
        context.bezierCurveTo((from + to) / 2, y(unit), (from + to) / 2, y(other), to - 6, y(other));
        context.stroke();
      }
    };
    for (let unit = first; unit < end; unit++) if (unit !== row) stroke(unit, 0.3);
    stroke(row, 1.15);
    context.globalAlpha = 1;
    context.textBaseline = "middle";
    for (let unit = first; unit < end; unit++) {
      const weight = matrix.values[row * matrix.size + unit];
      const text = short(units[unit].shown, MAX_CHARS);
      const quiet = units[unit].special ? muted : ink;
      context.direction = isRightToLeft(text) ? "rtl" : "ltr";
      context.font = `${unit === row ? "600 " : ""}13px ${family}`;
      context.fillStyle = unit === row ? accent : quiet;
      context.textAlign = "right";
      context.fillText(text, from, y(unit), from - 4);
      context.font = `${weight > 0.2 ? "600 " : ""}13px ${family}`;
      context.globalAlpha = 0.55 + 0.45 * Math.min(1, Math.sqrt(weight) * 1.4);
      context.fillStyle = weight > 0.2 ? accent : quiet;
      context.textAlign = "left";
      context.fillText(text, to, y(unit), width - to - 4);
      context.globalAlpha = 1;
    }
  }
}
