// A list box of tokens or words with colored backgrounds, navigable by pointer and arrow keys.
import { textColorOn } from "./color";
import { element, isRightToLeft, short } from "./dom";
import type { Unit } from "./units";

export interface ChipEvents {
  hover(index: number | null): void;
  choose(index: number): void;
}

const MAX_SHOWN = 80;
const TITLE_DELAY_MS = 120;
const MAX_UNBROKEN = 24; // characters after which a line may break
const UNSPACED_SCRIPTS = /^[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}]/u;
const LONG_TEXT = 110; // units above which the font size is reduced

export class Chips {
  readonly element: HTMLElement;
  private chips: HTMLElement[] = [];
  private units: Unit[] = [];
  private current = 0;
  private backgrounds: string[] = [];
  private timer = 0;
  private isNew = true;

  constructor(
    label: string,
    private readonly events: ChipEvents,
  ) {
    this.element = element("div", { class: "chips", role: "listbox", "aria-label": label, "aria-orientation": "horizontal" });
    this.element.addEventListener("pointerover", (event) => this.onPointer(event));
    this.element.addEventListener("pointerleave", () => events.hover(null));
    this.element.addEventListener("click", (event) => {
      const index = this.chipIndex(event.target);
      if (index !== null) this.choose(index, false);
    });
    this.element.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Show the given units, unless they are already shown. */
  show(units: Unit[]): void {
    if (units === this.units) return;
    this.units = units;
    this.backgrounds = [];
    window.clearTimeout(this.timer);
    this.element.dir = isRightToLeft(units.map((unit) => (unit.special ? "" : unit.shown)).join(" ")) ? "rtl" : "ltr";
    this.chips = units.map((unit, index) => {
      const kind = `chip${unit.special ? " special" : ""}`;
      return element(
        "span",
        { class: kind, role: "option", tabindex: -1, dir: "auto", "data-index": index, "aria-selected": "false" },
        short(unit.shown, MAX_SHOWN) || "·",
      );
    });
    const content: Node[] = [];
    let run = 0; // characters since the last space
    this.chips.forEach((chip, index) => {
      const { joined, shown } = units[index];
      if (index && !joined) content.push(document.createTextNode(" "));
      else if (index && (run > MAX_UNBROKEN || UNSPACED_SCRIPTS.test(shown))) content.push(element("wbr"));
      run = joined ? run + shown.length : shown.length;
      if (units[index].joined) {
        chip.classList.add("joined");
        this.chips[index - 1].classList.add("open");
      }
      content.push(chip);
    });
    this.element.replaceChildren(...content);
    this.element.classList.toggle("long", units.length > LONG_TEXT);
    this.current = Math.min(this.current, units.length - 1);
    this.rove(this.current);
  }

  /** Set backgrounds and tooltips. If `delayed`, tooltips are updated when the pointer rests. */
  paint(backgrounds: string[], titles: string[], delayed = false): void {
    const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
    this.chips.forEach((chip, index) => {
      chip.style.color = textColorOn(backgrounds[index], dark); // also if only the color scheme changed
      if (backgrounds[index] === this.backgrounds[index]) return;
      chip.style.backgroundColor = backgrounds[index];
      chip.classList.toggle("shaded", backgrounds[index] !== "transparent");
    });
    this.backgrounds = backgrounds;
    window.clearTimeout(this.timer);
    if (delayed) this.timer = window.setTimeout(() => this.setTitles(titles), TITLE_DELAY_MS);
    else this.setTitles(titles);
  }

  private setTitles(titles: string[]): void {
    this.chips.forEach((chip, index) => {
      chip.title = `${short(this.units[index].spelling, MAX_SHOWN)}: ${titles[index]}`;
    });
  }

  /** Mark a chip as selected. */
  mark(index: number | null): void {
    const before = this.chips[this.current];
    if (index === this.current && before.getAttribute("aria-selected") === "true") return;
    before.setAttribute("aria-selected", "false");
    if (index === null) return;
    this.rove(index);
    this.chips[index].setAttribute("aria-selected", "true");
    if (!this.isNew) this.reveal(this.chips[index]); // initially, keep the start of the text in view
    this.isNew = false;
  }

  /** Scroll a chip into view within the text, without scrolling the page. */
  private reveal(chip: HTMLElement): void {
    const box = this.element.getBoundingClientRect();
    const own = chip.getBoundingClientRect();
    if (own.top < box.top || own.bottom > box.bottom) this.element.scrollTop += own.top - box.top - box.height / 2;
  }

  /** Move the roving tab stop. */
  private rove(index: number): void {
    this.chips[this.current].tabIndex = -1;
    this.current = index;
    this.chips[index].tabIndex = 0;
  }

  private choose(index: number, focus: boolean): void {
    this.mark(index);
    if (focus) this.chips[index].focus();
    this.events.choose(index);
  }

  private onPointer(event: PointerEvent): void {
    if (event.pointerType === "touch") return; // touch events select instead
    this.events.hover(this.chipIndex(event.target));
  }

  private onKey(event: KeyboardEvent): void {
    const steps: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 };
    const forward = this.element.dir === "rtl" ? "ArrowLeft" : "ArrowRight";
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") steps[event.key] = event.key === forward ? 1 : -1;
    const last = this.chips.length - 1;
    let index: number;
    if (event.key === "Home") index = 0;
    else if (event.key === "End") index = last;
    else if (event.key in steps) index = Math.max(0, Math.min(last, this.current + steps[event.key]));
    else return;
    event.preventDefault();
    this.choose(index, true);
  }

  private chipIndex(target: EventTarget | null): number | null {
    const chip = target instanceof Element ? target.closest<HTMLElement>(".chip") : null;
    return chip ? Number(chip.dataset.index) : null;
  }
}
