// Bundle src/ and its types into lib/ or DIR. Usage: node build.mjs [DIR]
import { execFileSync } from "node:child_process";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const outdir = process.argv[2] ?? `${here}lib`;

await build({
  absWorkingDir: here,
  entryPoints: ["src/index.ts"],
  bundle: true,
  charset: "utf8",
  format: "esm",
  logLevel: "warning",
  outdir,
  target: ["es2022"],
});
const tsc = fileURLToPath(import.meta.resolve("typescript/bin/tsc"));
const types = ["--noEmit", "false", "--declaration", "--emitDeclarationOnly", "--outDir", outdir];
execFileSync(process.execPath, [tsc, "--project", here, ...types], { stdio: "inherit" });
