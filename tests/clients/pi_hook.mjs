// node pi_hook.mjs NODE_MODULES EXTENSION KEEP SESSION: pi loads the extension, asks it for a compaction of that
// session, takes its answer, and prints {errors, expected, compaction, messages}: all as pi has them.
import { pathToFileURL } from "node:url";

const [modules, extension, keep, session] = process.argv.slice(2);
const entry = (path) => pathToFileURL(`${modules}/@earendil-works/pi-coding-agent/dist/${path}`);
const pi = await import(entry("index.js"));
const { prepareCompaction } = await import(entry("core/compaction/index.js"));

const { extensions, errors, runtime } = await pi.discoverAndLoadExtensions([extension], process.cwd(), "/nowhere");
const manager = pi.SessionManager.open(session);
const runner = new pi.ExtensionRunner(extensions, runtime, process.cwd(), manager, {});
runner.onError((error) => errors.push(error));
const branchEntries = manager.getBranch();
const settings = { ...pi.DEFAULT_COMPACTION_SETTINGS, keepRecentTokens: Number(keep) };
const preparation = prepareCompaction(branchEntries, settings);
const { signal } = new AbortController();
const event = { type: "session_before_compact", preparation, branchEntries, customInstructions: undefined, signal };
const { compaction } = (await runner.emit(event)) ?? {};
if (compaction) {
  const { summary, firstKeptEntryId, tokensBefore, details } = compaction;
  manager.appendCompaction(summary, firstKeptEntryId, tokensBefore, details, true);
}
const messages = manager.buildSessionContext().messages;
console.log(JSON.stringify({ errors, expected: preparation.firstKeptEntryId, compaction, messages }));
