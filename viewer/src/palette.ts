// Colors and font of the style sheet, for drawing on a canvas.

export interface Palette {
  ink: string;
  muted: string;
  accent: string;
  family: string;
}

/** Read the palette. Call this once per color scheme, since it forces a style recalculation. */
export function paletteOf(element: HTMLElement): Palette {
  const style = getComputedStyle(element);
  const [ink, muted, accent] = ["--ink", "--muted", "--accent"].map((name) => style.getPropertyValue(name));
  return { ink, muted, accent, family: style.fontFamily };
}
