// A labeled text field with a hint and an error message.
import { element, newId } from "../dom";

export interface FieldOptions {
  label: string;
  hint: string;
  kind?: "text" | "lines" | "secret"; // in `lines`, Enter starts a new line
}

export class Field {
  readonly element: HTMLElement;
  private readonly input: HTMLTextAreaElement | HTMLInputElement;
  private readonly error = element("p", { class: "error", id: newId("error"), hidden: true });

  constructor({ label, hint, kind = "text" }: FieldOptions, submit: () => void) {
    const [id, hintId] = [newId("field"), newId("hint")];
    const attributes = { id, "aria-describedby": `${this.error.id} ${hintId}` };
    this.input =
      kind === "secret"
        ? element("input", { ...attributes, type: "password", autocomplete: "off" })
        : element("textarea", { ...attributes, rows: kind === "lines" ? 5 : 2, dir: "auto", spellcheck: "false" });
    this.input.addEventListener("keydown", (event: Event) => {
      if (!(event instanceof KeyboardEvent) || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      if (kind === "lines" && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      submit();
    });
    this.input.addEventListener("input", () => this.showError(null));
    this.element = element(
      "div",
      { class: kind === "lines" ? "field lines" : "field" },
      element("label", { for: id }, label),
      this.input,
      this.error,
      element("p", { class: "hint", id: hintId }, hint),
    );
  }

  get value(): string {
    return this.input.value;
  }

  set value(text: string) {
    this.input.value = text;
  }

  showError(message: string | null): void {
    this.error.textContent = message ?? "";
    this.error.hidden = message === null;
    this.input.setAttribute("aria-invalid", String(message !== null));
  }

  focus(): void {
    this.input.focus();
  }
}
