// A text as a line of tokens or words with backgrounds, one of which can be chosen: by pointer, or by arrow keys.
import { element, isRightToLeft, short } from "./dom";
import type { Unit } from "./units";

export interface ChipEvents {
  hover(place: number | null): void;
  choose(place: number): void;
}

const MAX_SHOWN = 80;
const REST_MS = 120;
const LONG_WORD = 24; // letters: a line may end in it
const WITHOUT_SPACES = /^[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}]/u;
const LONG = 110; // units: the text is set smaller

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
      const place = this.placeOf(event.target);
      if (place !== null) this.choose(place, false);
    });
    this.element.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Show these units; does nothing where it shows them already. */
  show(units: Unit[]): void {
    if (units === this.units) return;
    this.units = units;
    this.backgrounds = [];
    window.clearTimeout(this.timer);
    this.element.dir = isRightToLeft(units.map((unit) => (unit.special ? "" : unit.shown)).join(" ")) ? "rtl" : "ltr";
    this.chips = units.map((unit, place) => {
      const kind = `chip${unit.special ? " special" : ""}`;
      return element(
        "span",
        { class: kind, role: "option", tabindex: -1, dir: "auto", "data-place": place, "aria-selected": "false" },
        short(unit.shown, MAX_SHOWN) || "·",
      );
    });
    const content: Node[] = [];
    let run = 0; // letters since the last space
    this.chips.forEach((chip, place) => {
      const { joined, shown } = units[place];
      if (place && !joined) content.push(document.createTextNode(" "));
      else if (place && (run > LONG_WORD || WITHOUT_SPACES.test(shown))) content.push(element("wbr"));
      run = joined ? run + shown.length : shown.length;
      if (units[place].joined) {
        chip.classList.add("joined");
        this.chips[place - 1].classList.add("open");
      }
      content.push(chip);
    });
    this.element.replaceChildren(...content);
    this.element.classList.toggle("long", units.length > LONG);
    this.current = Math.min(this.current, units.length - 1);
    this.rove(this.current);
  }

  /** Set the backgrounds, and what each chip says of itself: at once, or when the pointer rests. */
  paint(backgrounds: string[], titles: string[], rests = false): void {
    this.chips.forEach((chip, place) => {
      if (backgrounds[place] === this.backgrounds[place]) return;
      chip.style.backgroundColor = backgrounds[place];
      chip.classList.toggle("shaded", backgrounds[place] !== "transparent");
    });
    this.backgrounds = backgrounds;
    window.clearTimeout(this.timer);
    if (rests) this.timer = window.setTimeout(() => this.entitle(titles), REST_MS);
    else this.entitle(titles);
  }

  private entitle(titles: string[]): void {
    this.chips.forEach((chip, place) => {
      chip.title = `${short(this.units[place].spelling, MAX_SHOWN)}: ${titles[place]}`;
    });
  }

  /** Show which one is chosen. */
  mark(place: number | null): void {
    const before = this.chips[this.current];
    if (place === this.current && before.getAttribute("aria-selected") === "true") return;
    before.setAttribute("aria-selected", "false");
    if (place === null) return;
    this.rove(place);
    this.chips[place].setAttribute("aria-selected", "true");
    if (!this.isNew) this.reveal(this.chips[place]); // a text opens at its beginning
    this.isNew = false;
  }

  /** Scroll the text, and not the page, until a chip is in sight. */
  private reveal(chip: HTMLElement): void {
    const box = this.element.getBoundingClientRect();
    const own = chip.getBoundingClientRect();
    if (own.top < box.top || own.bottom > box.bottom) this.element.scrollTop += own.top - box.top - box.height / 2;
  }

  /** Leave one in the order of the Tab key. */
  private rove(place: number): void {
    this.chips[this.current].tabIndex = -1;
    this.current = place;
    this.chips[place].tabIndex = 0;
  }

  private choose(place: number, focus: boolean): void {
    this.mark(place);
    if (focus) this.chips[place].focus();
    this.events.choose(place);
  }

  private onPointer(event: PointerEvent): void {
    if (event.pointerType === "touch") return; // a touch chooses
    this.events.hover(this.placeOf(event.target));
  }

  private onKey(event: KeyboardEvent): void {
    const steps: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 };
    const forward = this.element.dir === "rtl" ? "ArrowLeft" : "ArrowRight";
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") steps[event.key] = event.key === forward ? 1 : -1;
    const last = this.chips.length - 1;
    let place: number;
    if (event.key === "Home") place = 0;
    else if (event.key === "End") place = last;
    else if (event.key in steps) place = Math.max(0, Math.min(last, this.current + steps[event.key]));
    else return;
    event.preventDefault();
    this.choose(place, true);
  }

  private placeOf(target: EventTarget | null): number | null {
    const chip = target instanceof Element ? target.closest<HTMLElement>(".chip") : null;
    return chip ? Number(chip.dataset.place) : null;
  }
}
