// A plan as its pages say it: what this sender's regions and buckets are.

/** Every page of a plan, joined; `page(n)` fetches one. */
export async function fetchPlan(page) {
  const first = await page(0);
  const pages = [first];
  for (let n = 1; n < first.pages; n++) pages.push(await page(n));
  const members = first.members;
  const sets = first.receiver_sets.map((s) => s.members.map((m) => members[m]));
  const box = (ranges) => ranges.map((r) => [Number(r.start), Number(r.stop)]);
  const regions = pages
    .flatMap((p) => p.regions)
    .map((r) => ({
      tensor: r.tensor,
      box: box(r.box), // empty: all of the tensor
      sender: members[r.sender],
      receivers: sets[r.receiver_set],
      nbytes: Number(r.nbytes),
    }));
  const buckets = pages
    .flatMap((p) => p.buckets)
    .map((b, index) => ({
      index,
      sender: members[b.sender],
      receivers: sets[b.receiver_set],
      segments: b.segments.map((s) => ({ region: s.region, offset: Number(s.offset), nbytes: Number(s.nbytes) })),
    }));
  return { id: first.plan_id, regions, buckets };
}
