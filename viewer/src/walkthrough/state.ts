// The state of the page, and its form in the URL fragment. Defaults are omitted.
import { MODEL_OPTIONS, type Mask, type Options } from "./attention";
import type { LayerData, WalkthroughData } from "./data";

export interface State extends Options {
  step: number; // counted from 0
  token: number;
  layer: number; // index in the model
  head: number;
}

export const MIN_TEMPERATURE = 0.1;
export const MAX_TEMPERATURE = 10;

const MASKS: Mask[] = ["none", "causal", "padding"];

export function startState(data: WalkthroughData): State {
  return { ...MODEL_OPTIONS, ...data.start, step: 0 };
}

export function layerData(data: WalkthroughData, layer: number): LayerData {
  return data.layers.find((each) => each.index === layer) ?? data.layers[0];
}

/** Return whether the weights are computed as the model computes them. */
export function isUnchanged(state: State): boolean {
  return state.scaled && state.mask === "none" && state.temperature === 1;
}

/** Read the state from a URL fragment. Missing and invalid values are those of `startState`. */
export function fromFragment(fragment: string, data: WalkthroughData, steps: number): State {
  const parameters = new URLSearchParams(fragment.replace(/^#/, ""));
  const start = startState(data);
  const within = (name: string, first: number, last: number, fallback: number): number => {
    const value = Number(parameters.get(name) ?? NaN);
    return Number.isInteger(value) && value >= first && value <= last ? value : fallback;
  };
  const layer = Number(parameters.get("layer") ?? NaN);
  const known = data.layers.some((each) => each.index === layer) ? layer : start.layer;
  const { heads } = layerData(data, known);
  const temperature = Number(parameters.get("temperature") ?? NaN);
  return {
    step: within("step", 1, steps, 1) - 1,
    token: within("token", 0, data.tokens.length - 1, start.token),
    layer: known,
    head: within("head", 0, heads - 1, Math.min(start.head, heads - 1)),
    scaled: parameters.get("scaling") !== "off",
    mask: MASKS.find((mask) => mask === parameters.get("mask")) ?? start.mask,
    padding: within("padding", 1, Math.max(1, data.tokens.length - 1), start.padding),
    temperature: temperature >= MIN_TEMPERATURE && temperature <= MAX_TEMPERATURE ? temperature : start.temperature,
  };
}

export function toFragment(state: State): string {
  const parameters = new URLSearchParams();
  parameters.set("step", String(state.step + 1));
  for (const name of ["token", "layer", "head"] as const) parameters.set(name, String(state[name]));
  if (!state.scaled) parameters.set("scaling", "off");
  if (state.mask !== "none") parameters.set("mask", state.mask);
  if (state.mask === "padding") parameters.set("padding", String(state.padding));
  if (state.temperature !== 1) parameters.set("temperature", String(state.temperature));
  return `#${parameters}`;
}
