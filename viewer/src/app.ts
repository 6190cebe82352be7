// The application: holds the state, loads the attention maps it needs and redraws all views when it changes.
import { tableOf } from "./color";
import { HeadControls, UnitControls } from "./controls";
import type { PageData } from "./data";
import { element } from "./dom";
import { Maps, type MapSource } from "./maps";
import { counted } from "./numbers";
import { paletteOf, type Palette } from "./palette";
import type { Actions, Frame, State, View } from "./state";
import { matrixOf, unitAt, visibleUnits, type Matrix } from "./units";
import { ContrastView } from "./views/contrast_view";
import { MatrixView } from "./views/matrix_view";
import { notes } from "./views/notes";
import { Overview } from "./views/overview";
import { PairView } from "./views/pair_view";
import { rowSentence } from "./views/row_view";
import { TextView } from "./views/text_view";

const ANNOUNCE_AFTER_MS = 250;

export interface AppOptions {
  heading?: "h1" | "h2"; // heading level of the title
  start?: Partial<State>; // initial layer and head, ignored if out of range
  changed?: (state: State) => void; // called when the user selects another head
}

export class App implements Actions {
  private readonly maps: Maps;
  private readonly views: { draw(frame: Frame): void }[];
  private readonly status = element("p", { class: "visually-hidden", role: "status" });
  private readonly darkScheme = window.matchMedia("(prefers-color-scheme: dark)");
  private current: State;
  private matrix: Matrix | null = null;
  private matrixKey = "";
  private table = tableOf("viridis", false);
  private tableKey = "";
  private palette: Palette | null = null;
  private timer = 0;
  private refreshId = 0;
  private readonly onSchemeChange = (): void => void this.refresh();

  constructor(
    private readonly root: HTMLElement,
    readonly page: PageData,
    source: MapSource,
    private readonly options: AppOptions = {},
  ) {
    this.maps = new Maps(page, source);
    const start = startOf(page, options.start ?? {});
    this.current = {
      text: 0,
      layer: start.layer,
      head: start.head,
      level: "words",
      specials: true,
      scale: "viridis",
      row: start.row,
      hover: null,
      column: null,
    };
    const units = new UnitControls(this);
    const heads = new HeadControls(this);
    const views: View[] = page.contrast ? [new ContrastView(this, page.contrast)] : [];
    views.push(new TextView(this));
    if (page.pair) views.push(new PairView(this, page.pair));
    views.push(new MatrixView(this, heads.element), new Overview(this, this.maps));
    this.views = [units, heads, ...views];
    root.classList.add("attnlens");
    root.replaceChildren(this.header(units.element), ...views.map((view) => view.element), notes(page), this.status);
    this.darkScheme.addEventListener("change", this.onSchemeChange);
  }

  /** Stop drawing, before another page replaces this one. */
  close(): void {
    this.darkScheme.removeEventListener("change", this.onSchemeChange);
    window.clearTimeout(this.timer);
    this.refreshId = Infinity;
    delete this.root.dataset.ready;
  }

  state(): State {
    return this.current;
  }

  change(part: Partial<State>): void {
    const before = this.current;
    const changed = Object.entries(part).some(([name, value]) => before[name as keyof State] !== value);
    if (!changed) return;
    this.current = { ...before, ...part };
    void this.refresh();
    if ("layer" in part || "head" in part) this.options.changed?.(this.current);
    if (["row", "layer", "head", "level", "specials"].some((name) => name in part)) this.announceSoon();
  }

  /** Redraw all views: immediately if the layer is cached, otherwise once it is decompressed. */
  async refresh(): Promise<void> {
    const refreshId = ++this.refreshId;
    const { text, layer } = this.current;
    const bytes = this.maps.cached(text, layer) ?? (await this.maps.layer(text, layer));
    if (refreshId !== this.refreshId) return;
    const frame = this.frame(bytes);
    for (const view of this.views) view.draw(frame);
    if (!this.root.dataset.ready) {
      this.root.dataset.ready = "true";
      performance.mark("attnlens-first");
    }
    this.root.dataset.drawn = `${text} ${layer} ${this.current.head ?? "mean"}`;
  }

  private frame(bytes: Uint8Array): Frame {
    const { text, layer, head, level, specials, scale, row, hover, column } = this.current;
    const data = this.page.texts[text];
    const units = visibleUnits(data.tokens, level, specials);
    const key = [text, layer, head, level, specials].join(" ");
    if (key !== this.matrixKey || !this.matrix) {
      this.matrix = matrixOf(bytes, data.tokens, { head, level, specials });
      this.matrixKey = key;
    }
    const dark = this.isDark();
    if (`${scale} ${dark}` !== this.tableKey || !this.palette) {
      this.palette = paletteOf(this.root);
      this.table = tableOf(scale, dark);
      this.tableKey = `${scale} ${dark}`;
    }
    return {
      state: this.current,
      text: data,
      units,
      matrix: this.matrix,
      row: unitAt(units, hover ?? row),
      chosen: unitAt(units, row),
      column: column === null ? null : unitAt(units, column),
      table: this.table,
      palette: this.palette,
      dark,
    };
  }

  private isDark(): boolean {
    return this.darkScheme.matches;
  }

  private header(units: HTMLElement): HTMLElement {
    const [{ layers, heads }] = this.page.texts;
    const sizes = this.page.texts.map((text) => counted(text.tokens.length, "token")).join(" and ");
    const facts = [this.page.model, sizes, `${counted(layers, "layer")} of ${counted(heads, "head")}`];
    if (this.page.kept !== null) facts.push(`the ${this.page.kept} largest weights of each row`);
    return element(
      "header",
      { class: "top" },
      element("div", {}, element(this.options.heading ?? "h1", { class: "title", dir: "auto" }, this.page.title), element("p", { class: "facts" }, facts.join(" · "))),
      units,
    );
  }

  private announceSoon(): void {
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => {
      const { text, layer } = this.current;
      const bytes = this.maps.cached(text, layer);
      if (bytes) this.status.textContent = rowSentence(this.frame(bytes));
    }, ANNOUNCE_AFTER_MS);
  }
}

/** Return the initial head and row. */
function startOf(page: PageData, requested: Partial<State>): Pick<State, "layer" | "head" | "row"> {
  const { start, layers, heads } = page.texts[0];
  const { layer, head }: Pick<State, "layer" | "head"> = { ...start, ...requested };
  const isValid = (index: number, count: number): boolean => Number.isInteger(index) && index >= 0 && index < count;
  return isValid(layer, layers) && (head === null || isValid(head, heads)) ? { ...start, layer, head } : start;
}
